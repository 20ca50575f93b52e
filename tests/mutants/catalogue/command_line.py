"""Models taken by name that must not be, wrong input that passes, and endings with a traceback."""

from __future__ import annotations

from tests.mutants.mutant import Mutant

RESOLVE = "sglang_dspark/models/resolve.py"
LAYOUT = "sglang_dspark/drafter/speculators.py"
FILES = "sglang_dspark/common/files.py"
WRITING = "sglang_dspark/common/atomic_write.py"
MAIN = "sglang_dspark/cli/main.py"
BY_NAME = "tests/models/test_resolve.py"
READ = "tests/drafter/test_speculators.py"
INPUTS = "tests/cli/test_wrong_inputs.py"
ENDINGS = "tests/cli/test_endings.py"


def _mutant(name: str, file: str, old: str, new: str, *tests: str) -> Mutant:
    return Mutant(name=name, area="command line", file=file, old=old, new=new, tests=tests)


MUTANTS = (
    _mutant(
        "pickles are downloaded",
        RESOLVE,
        '"tokenizer.model")',
        '"tokenizer.model", "*.bin")',
        f"{BY_NAME}::test_it_is_fetched_without_pickles_and_kept",
    ),
    _mutant(
        "a part of a model in the cache is taken",
        RESOLVE,
        "    _require_whole(folder, given)\n",
        "",
        f"{BY_NAME}::test_a_cache_without_a_listing_is_checked",
    ),
    _mutant(
        "a missing folder is asked for on the hub",
        RESOLVE,
        "(?P<name>[A-Za-z0-9]",
        "(?P<name>[A-Za-z0-9.]",
        f"{BY_NAME}::test_what_looks_like_a_path_is_a_missing_folder",
    ),
    _mutant(
        "a revision is forgotten",
        RESOLVE,
        '        "revision": revision,\n',
        "",
        f"{BY_NAME}::test_a_revision",
    ),
    _mutant(
        "layers of Speculators are counted from 0",
        LAYOUT,
        "[i - 1 for i in features]",
        "list(features)",
        f"{READ}::test_it_drafts_as_the_drafter_that_was_written",
    ),
    _mutant(
        "a reduced draft vocabulary is read as a whole one",
        LAYOUT,
        "drafted == whole, known",
        "True, known",
        f"{READ}::test_what_is_not_read_is_named",
    ),
    _mutant(
        "a block that starts behind the anchor is read",
        LAYOUT,
        "first is True",
        "True",
        f"{READ}::test_what_is_not_read_is_named",
    ),
    _mutant(
        "the nearest field is not named",
        FILES,
        "{f'; did you mean {near[0]}?' if near else ''}",
        "",
        INPUTS,
    ),
    _mutant(
        "the kind of a drafter stands in the path of its fields",
        FILES,
        "        if len(here) > 1 and tagged:\n            here = tagged\n            continue\n",
        "",
        INPUTS,
    ),
    _mutant(
        "a device is replaced by a file",
        WRITING,
        "    if path.exists() and not path.is_file():\n",
        "    if path.is_dir():\n",
        INPUTS,
    ),
    _mutant(
        "a full disk is a traceback",
        MAIN,
        "(errno.ENOSPC, errno.EDQUOT)",
        "(errno.EDQUOT,)",
        f"{ENDINGS}::test_a_full_disk_is_one_line",
    ),
    _mutant(
        "a reader that has gone is a traceback",
        MAIN,
        "    except BrokenPipeError:\n        _drop_output()\n",
        "    except BrokenPipeError:\n        raise\n",
        f"{ENDINGS}::test_a_result_that_nobody_reads_is_no_traceback",
    ),
    _mutant(
        "Ctrl-C ends without a word",
        MAIN,
        '            print("\\ndspark: stopped", file=sys.stderr)\n',
        "",
        f"{ENDINGS}::test_ctrl_c_is_one_line",
    ),
    _mutant(
        "half of a drafter is left behind",
        WRITING,
        "            temporary.unlink()\n",
        "            pass\n",
        f"{ENDINGS}::test_a_drafter_that_cannot_be_written_leaves_the_earlier_one",
    ),
    _mutant(
        "torch that cannot be imported ends the doctor",
        "sglang_dspark/serving/installation.py",
        "        except Exception as error:\n",
        "        except ModuleNotFoundError as error:\n",
        "tests/cli/test_doctor.py::test_a_package_that_cannot_be_imported",
    ),
)
