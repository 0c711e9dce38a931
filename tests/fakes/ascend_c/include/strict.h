// Included before a kernel where clang only checks it (build.py: check). In clang's CUDA mode `__aicore__` functions are
// device functions, which can call each other and the twin, but no function of the host; and pointers to global memory
// have an address space of their own. The twin's own code is both, and the standard library is the host's.
#pragma once
#include <ucontext.h>

#include <cstdlib>  // before those that clang wraps

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#pragma clang force_cuda_host_device begin
#include "kernel_operator.h"
#include "kernel_tiling.h"
#pragma clang force_cuda_host_device end
