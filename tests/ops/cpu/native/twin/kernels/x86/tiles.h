// A twin of ops/cpu/csrc/kernels/x86/tiles.h in plain C++, for CPUs without AMX: what stands before it in the include
// path is compiled against it. What a CPU answers with a fault ends the program here: a tile without a shape, or a
// product of tiles whose shapes do not fit. Configuring clears the tiles, and writing one clears the rest of it.
//
// Sums of bfloat16 as Intel's manual defines them: a product's even and odd elements are added up apart, each from zero
// by fused multiply-adds; then the two sums, then that and C. Denormals count as zero and become zero.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "kernels/x86/tile_shapes.h"

namespace umbra {

namespace twin {

struct State {
    TileShapes shapes{0};
    uint8_t tile[8][16][64];
};
inline thread_local State state;

inline void demand(bool holds, const char* rule, int tile) {
    if (holds) return;
    std::printf("tile %d: %s\n", tile, rule);
    std::exit(1);
}

inline int rows_of(int tile) {
    demand(state.shapes.palette == 1 && state.shapes.rows[tile], "it has no shape", tile);
    return state.shapes.rows[tile];
}
inline int bytes_of(int tile) { return state.shapes.bytes[tile]; }

template <class T>
T element(int tile, int row, int column) {
    T value;
    std::memcpy(&value, state.tile[tile][row] + column * sizeof(T), sizeof(T));
    return value;
}

inline float flushed(float v) { return std::fpclassify(v) == FP_SUBNORMAL ? std::copysign(0.0f, v) : v; }
inline float widened(uint16_t bits) {
    const uint32_t word = static_cast<uint32_t>(bits) << 16;
    float v;
    std::memcpy(&v, &word, sizeof v);
    return flushed(v);
}

// Sets every element of C to f(itself, row of A, column of B).
template <class T, class F>
void each_sum(int c, int a, int b, F&& f) {
    demand(rows_of(c) == rows_of(a), "it has other rows than the first operand", c);
    demand(bytes_of(c) == bytes_of(b), "it has other columns than the second operand", c);
    demand(bytes_of(a) == 4 * rows_of(b), "its columns are not the rows of the second operand", a);
    for (int m = 0; m < rows_of(c); m++)
        for (int n = 0; n < bytes_of(c) / 4; n++) {
            const T sum = f(element<T>(c, m, n), m, n);
            std::memcpy(state.tile[c][m] + n * sizeof(T), &sum, sizeof(T));
        }
}

}  // namespace twin

inline bool tiles_work() { return true; }

inline void configure(const TileShapes& shapes) {
    for (int i = 0; i < 8; i++)
        twin::demand(shapes.palette == 1 && shapes.rows[i] <= 16 && shapes.bytes[i] <= 64, "its shape is too large", i);
    twin::state.shapes = shapes;
    std::memset(twin::state.tile, 0, sizeof twin::state.tile);
}
inline void release_tiles() { twin::state.shapes.palette = 0; }

template <int Tile>
void tile_zero() {
    twin::rows_of(Tile);
    std::memset(twin::state.tile[Tile], 0, sizeof twin::state.tile[Tile]);
}
template <int Tile>
void tile_load(const void* from, size_t stride) {
    tile_zero<Tile>();
    for (int r = 0; r < twin::rows_of(Tile); r++)
        std::memcpy(twin::state.tile[Tile][r], static_cast<const uint8_t*>(from) + r * stride, twin::bytes_of(Tile));
}
template <int Tile>
void tile_store(void* to, size_t stride) {
    for (int r = 0; r < twin::rows_of(Tile); r++)
        std::memcpy(static_cast<uint8_t*>(to) + r * stride, twin::state.tile[Tile][r], twin::bytes_of(Tile));
}
template <int C, int A, int B>
void tile_dot_int8() {
    twin::each_sum<int32_t>(C, A, B, [](int32_t sum, int m, int n) {
        for (int k = 0; k < twin::bytes_of(A); k++)
            sum += twin::element<int8_t>(A, m, k) * twin::element<int8_t>(B, k / 4, 4 * n + k % 4);
        return sum;
    });
}
template <int C, int A, int B>
void tile_dot_bf16() {
    twin::each_sum<float>(C, A, B, [](float sum, int m, int n) {
        float parts[2] = {};
        for (int k = 0; k < twin::bytes_of(A) / 2; k++) {
            const float a = twin::widened(twin::element<uint16_t>(A, m, k));
            const float b = twin::widened(twin::element<uint16_t>(B, k / 2, 2 * n + k % 2));
            parts[k % 2] = twin::flushed(std::fma(a, b, parts[k % 2]));
        }
        return twin::flushed(twin::flushed(sum) + twin::flushed(parts[0] + parts[1]));
    });
}

}  // namespace umbra
