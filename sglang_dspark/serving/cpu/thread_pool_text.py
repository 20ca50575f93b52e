"""LLVM assembly of the thread pool (thread_pool.py): who takes which part, and how threads wait.

`@ticket` holds a job's number above and the parts that nobody has taken yet below; taking one is
one exchange of it, so a thread that comes late finds another number and takes nothing of a job that
is over. Only who has taken a part reads the job, which stays until all its parts are done.
"""

from __future__ import annotations

SPINS = 4000  # pauses before a waiting thread sleeps: some tens of microseconds
_PARTS_A_THREAD = 4  # so that one who is held up by other work leaves the rest to others


def assembly(futex: int) -> str:
    """The module as text. futex: the number of that system call."""
    return _TEXT.replace("FUTEX", str(futex))


_TEXT = f"""
@ticket = internal global i64 0, align 64
@sleeping = internal global i32 0, align 64
@done = internal global i64 0, align 64
@busy = internal global i32 0, align 64
@work = internal global ptr null
@data = internal global ptr null
@length = internal global i64 0
@step = internal global i64 0
declare i64 @syscall(i64, ...)
declare void @llvm.x86.sse2.pause()
declare i64 @llvm.smin.i64(i64, i64)

; Takes a part of the job at hand and does it; whether there was one.
define internal i1 @take() {{
entry:
  %seen = load atomic i64, ptr @ticket acquire, align 8
  br label %again
again:
  %t = phi i64 [ %seen, %entry ], [ %now, %claim ]
  %left = and i64 %t, 4294967295
  %none = icmp eq i64 %left, 0
  br i1 %none, label %nothing, label %claim
claim:
  %next = sub i64 %t, 1
  %pair = cmpxchg ptr @ticket, i64 %t, i64 %next acq_rel acquire, align 8
  %now = extractvalue {{ i64, i1 }} %pair, 0
  %mine = extractvalue {{ i64, i1 }} %pair, 1
  br i1 %mine, label %do, label %again
do:
  %f = load ptr, ptr @work
  %d = load ptr, ptr @data
  %n = load i64, ptr @length
  %s = load i64, ptr @step
  %part = sub i64 %left, 1
  %first = mul i64 %part, %s
  %after = add i64 %first, %s
  %end = call i64 @llvm.smin.i64(i64 %after, i64 %n)
  call void %f(ptr %d, i64 %first, i64 %end)
  %was = atomicrmw add ptr @done, i64 1 acq_rel, align 8
  ret i1 true
nothing:
  ret i1 false
}}

; Does `work(data, first, end)` over 0 .. length in parts, here and in the threads that wait.
define void @pool_run(ptr %work, ptr %data, i64 %length, i64 %threads) {{
entry:
  %alone = icmp sle i64 %threads, 1
  br i1 %alone, label %whole, label %enter
enter:
  %was = cmpxchg ptr @busy, i32 0, i32 1 acquire monotonic, align 4
  %free = extractvalue {{ i32, i1 }} %was, 1
  br i1 %free, label %share, label %whole
whole:
  call void %work(ptr %data, i64 0, i64 %length)
  ret void
share:
  %wanted = mul i64 %threads, {_PARTS_A_THREAD}
  %a = add i64 %length, %wanted
  %b = sub i64 %a, 1
  %step = sdiv i64 %b, %wanted
  %c = add i64 %length, %step
  %d = sub i64 %c, 1
  %parts = sdiv i64 %d, %step
  store ptr %work, ptr @work
  store ptr %data, ptr @data
  store i64 %length, ptr @length
  store i64 %step, ptr @step
  store atomic i64 0, ptr @done monotonic, align 8
  %before = load atomic i64, ptr @ticket monotonic, align 8
  %number = lshr i64 %before, 32
  %following = add i64 %number, 1
  %above = shl i64 %following, 32
  %ticket = or i64 %above, %parts
  store atomic i64 %ticket, ptr @ticket seq_cst, align 8
  %asleep = load atomic i32, ptr @sleeping seq_cst, align 4
  %some = icmp ne i32 %asleep, 0
  br i1 %some, label %wake, label %own
wake:
  %word = getelementptr i8, ptr @ticket, i64 4
  %woken = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i32 129, i32 2147483647, ptr null)
  br label %own
own:
  %took = call i1 @take()
  br i1 %took, label %own, label %wait
wait:
  %finished = load atomic i64, ptr @done acquire, align 8
  %over = icmp eq i64 %finished, %parts
  br i1 %over, label %leave, label %pause
pause:
  call void @llvm.x86.sse2.pause()
  br label %wait
leave:
  store atomic i32 0, ptr @busy release, align 4
  ret void
}}

; What a thread of the pool does until the process ends, or `stop` is not 0.
define void @pool_serve(ptr %stop) {{
entry:
  br label %look
look:
  %took = call i1 @take()
  br i1 %took, label %look, label %spin
spin:
  %i = phi i64 [ 0, %look ], [ %i.next, %idle ]
  %t = load atomic i64, ptr @ticket monotonic, align 8
  %left = and i64 %t, 4294967295
  %some = icmp ne i64 %left, 0
  br i1 %some, label %look, label %idle
idle:
  call void @llvm.x86.sse2.pause()
  %i.next = add i64 %i, 1
  %patient = icmp slt i64 %i.next, {SPINS}
  br i1 %patient, label %spin, label %rest
rest:
  %ended = load atomic i32, ptr %stop acquire, align 4
  %end = icmp ne i32 %ended, 0
  br i1 %end, label %exit, label %sleep
sleep:
  %up = atomicrmw add ptr @sleeping, i32 1 seq_cst, align 4
  %last = load atomic i64, ptr @ticket seq_cst, align 8
  %still = and i64 %last, 4294967295
  %nothing = icmp eq i64 %still, 0
  br i1 %nothing, label %bed, label %awake
bed:
  %word = getelementptr i8, ptr @ticket, i64 4
  %high = lshr i64 %last, 32
  %number = trunc i64 %high to i32
  %slept = call i64 (i64, ...) @syscall(i64 FUTEX, ptr %word, i32 128, i32 %number, ptr null)
  br label %awake
awake:
  %down = atomicrmw sub ptr @sleeping, i32 1 seq_cst, align 4
  br label %look
exit:
  ret void
}}
"""
