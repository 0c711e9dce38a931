// AMX: eight tile registers, each up to 16 rows of 64 bytes, and the instructions on them that the kernels use, by number.
// GCC's own intrinsics take the numbers as text only, and do not say that a tile's load reads memory.
//
// A tile has the shape that the last `configure` gave it, on the thread that called it. A product C += A B takes C as
// (rows of A, columns), A as (rows, groups of 4 bytes along the inner dimension) and B as (groups, columns), where an
// element of B is a group too: 4 int8, or 2 bfloat16.
//
// tests/ops/cpu/native/twin has the same names in plain C++.
#pragma once

#include <cstddef>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "kernels/x86/tile_shapes.h"

namespace umbra {

// Whether the CPU has AMX with products of int8 and bfloat16 and Linux lets this process use it. Linux saves the tiles
// of a process only once it has asked; threads that exist already may use them then too.
inline bool tiles_work() {
#if defined(__linux__)
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
           __builtin_cpu_supports("amx-bf16") && syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
#else
    return false;
#endif
}

inline void configure(const TileShapes& shapes) { asm volatile("ldtilecfg %0" : : "m"(shapes)); }
inline void release_tiles() { asm volatile("tilerelease"); }

template <int Tile>
inline void tile_zero() {
    asm volatile("tilezero %%tmm%c0" : : "i"(Tile));
}
// Rows lie `stride` bytes apart.
template <int Tile>
inline void tile_load(const void* from, size_t stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(from), "r"(stride), "i"(Tile) : "memory");
}
template <int Tile>
inline void tile_store(void* to, size_t stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(to), "r"(stride), "i"(Tile) : "memory");
}
// Of signed bytes, into int32.
template <int C, int A, int B>
inline void tile_dot_int8() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}
// Of bfloat16, into float.
template <int C, int A, int B>
inline void tile_dot_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(C), "i"(A), "i"(B));
}

}  // namespace umbra
