// Kernels need only the macros of kernel_tiling.h.
#pragma once
