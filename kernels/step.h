// One step of the forward pass, from the costs of the nodes before a window to those behind it.
// Included once per pair of step widths, with STEP, KIN and KOUT defined.
//
// Node `e` has the candidates `q << (16 - KOUT) | e`, which come from node `candidate >> KIN`. A
// work-item owns GROUPS runs of RUN neighbouring nodes. With SPLIT above 1 it owns one run and shares the
// run's candidates with SPLIT - 1 others.

#if ARITHMETIC == EMULATED
#include "step_emulated.h"
#else
#include "step_halves.h"
#endif

#undef STEP
#undef KIN
#undef KOUT
