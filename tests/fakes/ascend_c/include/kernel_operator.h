// The header that Ascend C kernels include; here it is the host twin. README.md says what it checks and what it does not.
#pragma once
#include "reduce.h"
