#include "abi.h"

// Python refuses a library whose number is not its own (gblr/ops/native/__init__.py).
GBLR_API int gblr_abi() { return 2; }
