// Names of operators: functions that are compiled once for each instruction set, as csrc.py lists.
//
// NAMED(name) is dspark_<name>_<set>, exported with C linkage. An operator calls another one of its
// own instruction set by the same macro. Everything else in an operator's source is in an unnamed
// namespace, for the reason that matmul.cpp gives.
#pragma once
#include "pool.h"

#define JOINED_NAME(name, isa) dspark_##name##_##isa
#define OWN_NAME(name, isa) JOINED_NAME(name, isa)
#define NAMED(name) OWN_NAME(name, DSPARK_ISA)
