// The thread pool of pool.cpp, as matmul.cpp and Python call it.
#pragma once
#include <cstdint>

#define DSPARK_EXPORT __attribute__((visibility("default")))

extern "C" {
// Part of a job: rows first .. end of what `data` describes.
typedef void (*dspark_work)(void *data, int64_t first, int64_t end);

// Run work(data, first, end) over 0 .. length in parts, in the caller and in the serving threads.
// Returns when every part is done. threads <= 1, or a pool that is busy: one part, in the caller.
DSPARK_EXPORT void dspark_pool_run(dspark_work work, void *data, int64_t length,
                                   int64_t threads);

// Take parts of jobs in the calling thread until *stop is not 0. A sleeping thread reads *stop
// after the next job, so set it and run one.
DSPARK_EXPORT void dspark_pool_serve(const int32_t *stop);
}
