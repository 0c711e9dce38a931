// q4 matrices of pseudo-random rows, divided over the nodes of a pool as ops/cpu/matrix.py divides them.
#pragma once

#include <memory>
#include <vector>

#include "kernels/pack.h"
#include "runtime/buffer.h"

inline float pseudo_random(int64_t i) {
    uint64_t z = (static_cast<uint64_t>(i) + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    return static_cast<float>(z >> 40) / (1 << 23) - 1.0f;
}

struct Weights {
    std::vector<std::unique_ptr<umbra::Buffer>> buffers;  // one for each team
    std::vector<int64_t> bytes;
    umbra::SplitMatrix matrix{umbra::Matrix{}};

    Weights(umbra::Pool& pool, const std::vector<umbra::Team>& teams, int count, int rows, int columns, int unit = 16) {
        std::vector<umbra::Matrix> parts;
        for (int n = 0; n < pool.nodes(); n++) {
            umbra::Matrix part;
            part.format = umbra::format_named("q4");
            part.n = (pool.first(rows / unit, n + 1) - pool.first(rows / unit, n)) * unit;
            part.k = columns;
            part.group = 32;
            const int64_t quants = int64_t{count} * part.n * columns / 2;  // a multiple of 64: 16 rows of 32 columns
            bytes.push_back(quants + quants / 16 * 2);
            buffers.push_back(std::make_unique<umbra::Buffer>(bytes[n], teams[n].memory));
            part.quants = reinterpret_cast<const uint8_t*>(buffers[n]->address());
            part.scales = reinterpret_cast<const uint16_t*>(part.quants + quants);
            parts.push_back(part);
        }
        matrix = umbra::SplitMatrix(parts);
        umbra::Context context{pool, umbra::kernels_generic()};
        std::vector<float> row(columns);
        for (int64_t i = 0; i < int64_t{count} * rows; i++) {
            for (int c = 0; c < columns; c++) row[c] = pseudo_random(i * columns + c);
            const umbra::Table floats{reinterpret_cast<const uint8_t*>(row.data()), umbra::Kind::f32, 0, 4};
            umbra::pack_rows(context, matrix, {i / rows, i % rows, 1}, 1, columns, {floats, {}, {}}, false);
        }
    }
};
