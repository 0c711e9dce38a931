#include "pack.h"

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace umbra {
namespace {

struct Place {
    uint8_t* quants;  // of the row block
    uint16_t* scales;
    uint8_t* zeros;
    int lane;
};

Place place_of(const Matrix& w, int64_t row) {
    const int64_t block = row / kRows;
    return {const_cast<uint8_t*>(w.quants) + block * w.quant_stride(),
            const_cast<uint16_t*>(w.scales) + block * w.scale_count(),
            w.zeros ? const_cast<uint8_t*>(w.zeros) + block * w.scale_count() : nullptr, static_cast<int>(row % kRows)};
}

// Where the quant of column c stands, and whether in the high nibble.
size_t byte_of(Format format, int64_t c, int lane) {
    const int64_t b = c / kBlock, i = c % kBlock;
    return format == Format::q8 ? b * 512 + i / 4 * 64 + lane * 4 + i % 4 : b * 256 + i % 16 / 4 * 64 + lane * 4 + i % 4;
}

void pack_quantised(const Matrix& w, const Place& to, int64_t k, const float* from) {
    for (int64_t start = 0; start < k; start += w.group) {
        const int64_t end = std::min<int64_t>(start + w.group, k);
        float most = 0;  // signed
        for (int64_t c = start; c < end; c++)
            if (std::fabs(from[c]) > std::fabs(most)) most = from[c];
        const int middle = w.format == Format::q8 ? 128 : 8;
        const float exact = w.format == Format::q8 ? std::fabs(most) / 127.0f : most / -8.0f;
        const uint16_t half = float_to_half(exact);
        const float scale = half_to_float(half), inverse = scale != 0 ? 1.0f / scale : 0.0f;
        to.scales[start / w.group * kRows + to.lane] = half;
        if (to.zeros) to.zeros[start / w.group * kRows + to.lane] = static_cast<uint8_t>(middle);
        for (int64_t c = start; c < end; c++) {
            const int least = w.format == Format::q8 ? -127 : -8, largest = w.format == Format::q8 ? 127 : 7;
            const int q = std::clamp(static_cast<int>(std::nearbyint(from[c] * inverse)), least, largest) + middle;
            uint8_t& byte = to.quants[byte_of(w.format, c, to.lane)];
            if (w.format == Format::q8)
                byte = static_cast<uint8_t>(q);
            else
                byte = static_cast<uint8_t>(c % kBlock < 16 ? (byte & 0xf0) | q : (byte & 0x0f) | q << 4);
        }
    }
}

}  // namespace

void pack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, const float* from) {
    for (int64_t i = 0; i < count; i++, from += k) {
        const Place to = place_of(w, first + i);
        if (w.quantised()) {
            pack_quantised(w, to, k, from);
            continue;
        }
        with_type(static_cast<Type>(w.format), [&](auto example) {
            using T = decltype(example);
            for (int64_t c = 0; c < k; c++) reinterpret_cast<T*>(to.quants)[c * kRows + to.lane] = narrow<T>(from[c]);
        });
    }
}

void unpack_rows(const Matrix& w, int64_t first, int64_t count, int64_t k, float* to) {
    for (int64_t i = 0; i < count; i++, to += k) {
        const Place from = place_of(w, first + i);
        if (!w.quantised()) {
            with_type(static_cast<Type>(w.format), [&](auto example) {
                using T = decltype(example);
                for (int64_t c = 0; c < k; c++) to[c] = widen(reinterpret_cast<const T*>(from.quants)[c * kRows + from.lane]);
            });
            continue;
        }
        for (int64_t c = 0; c < k; c++) {
            const uint8_t byte = from.quants[byte_of(w.format, c, from.lane)];
            const int q = w.format == Format::q8 ? byte : c % kBlock < 16 ? byte & 15 : byte >> 4;
            const int64_t at = c / w.group * kRows + from.lane;
            const int zero = from.zeros ? from.zeros[at] : w.format == Format::q8 ? 128 : 8;
            to[c] = static_cast<float>(q - zero) * half_to_float(from.scales[at]);
        }
    }
}

}  // namespace umbra
