// For kernels the macros of kernel_tiling.h are enough.
#pragma once
