// The header that Ascend C kernels include; this one is the host twin's. README.md says what the twin checks.
#pragma once
#include "sort.h"
