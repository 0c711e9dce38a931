#include "pack.h"

#include <algorithm>
#include <cmath>

#include "vector.h"

namespace umbra {
namespace {

struct Place {  // of one row
    uint8_t* quants;  // of its row block
    uint16_t* scales;
    uint8_t* zeros;
    int lane;
};

Place place_of(const Matrix& w, int64_t row) {
    const int64_t block = row / kRows;
    const int lane = static_cast<int>(row % kRows);
    return {const_cast<uint8_t*>(w.quants) + block * w.quant_stride(),
            const_cast<uint16_t*>(w.scales) + block * w.scale_count() + lane,
            w.zeros ? const_cast<uint8_t*>(w.zeros) + block * w.scale_count() + lane : nullptr, lane};
}

// The quants of one row and one block of 32 columns, to and from where matrix.h puts them.
void put_block(Format format, uint8_t* plane, int lane, const uint8_t* q) {
    for (int i = 0; i < kBlock; i += 4) {
        if (format == Format::q8)
            std::memcpy(plane + i * kRows + lane * 4, q + i, 4);
        else if (i < 16)
            for (int j = 0; j < 4; j++)
                plane[i * kRows + lane * 4 + j] = static_cast<uint8_t>(q[i + j] | q[16 + i + j] << 4);
    }
}

void get_block(Format format, const uint8_t* plane, int lane, uint8_t* q) {
    for (int c = 0; c < kBlock; c++) {
        const int column = format == Format::q8 ? c : c % 16;
        const uint8_t byte = plane[column / 4 * 64 + lane * 4 + column % 4];
        q[c] = format == Format::q8 ? byte : c < 16 ? byte & 15 : byte >> 4;
    }
}

CLONES void range(const float* x, int64_t count, float* least, float* most) {
    float low = 0, high = 0;
    for (int64_t i = 0; i < count; i++) {
        low = x[i] < low ? x[i] : low;
        high = x[i] > high ? x[i] : high;
    }
    *least = low, *most = high;
}

// Nearest integers to x * inverse, plus zero, kept within 0 .. largest.
CLONES void levels(const float* x, float inverse, int zero, int largest, uint8_t* q) {
    for (int i = 0; i < kBlock; i++) {
        const float shifted = x[i] * inverse + 12582912.0f;  // 1.5 * 2^23: the nearest integer falls into the low bits
        int32_t bits;
        std::memcpy(&bits, &shifted, 4);
        const int32_t level = bits - 0x4b400000 + zero;
        q[i] = static_cast<uint8_t>(level < 0 ? 0 : level > largest ? largest : level);
    }
}

void pack_quantised(const Matrix& w, const Place& to, int64_t k, const float* from) {
    const int largest = w.format == Format::q8 ? 255 : 15, middle = (largest + 1) / 2;
    for (int64_t start = 0; start < k; start += w.group) {
        float least, most;
        range(from + start, w.group, &least, &most);
        float exact;
        if (to.zeros)
            exact = (most - least) / static_cast<float>(largest);
        else if (w.format == Format::q8)
            exact = std::max(most, -least) / 127.0f;
        else
            exact = (most > -least ? most : least) / -8.0f;
        const uint16_t half = float_to_half(exact);
        const float scale = half_to_float(half), inverse = scale != 0 ? 1.0f / scale : 0.0f;
        const int64_t at = start / w.group * kRows;
        to.scales[at] = half;
        int zero = middle;
        if (to.zeros) {
            zero = std::clamp(static_cast<int>(std::nearbyint(-least * inverse)), 0, largest);
            to.zeros[at] = static_cast<uint8_t>(zero);
        }
        for (int64_t c = start; c < start + w.group; c += kBlock) {
            uint8_t q[kBlock];
            levels(from + c, inverse, zero, largest, q);
            put_block(w.format, to.quants + c / kBlock * (w.quant_stride() / (k / kBlock)), to.lane, q);
        }
    }
}

void unpack_quantised(const Matrix& w, const Place& from, int64_t k, float* to) {
    for (int64_t c = 0; c < k; c += kBlock) {
        uint8_t q[kBlock];
        get_block(w.format, from.quants + c / kBlock * (w.quant_stride() / (k / kBlock)), from.lane, q);
        const int64_t at = c / w.group * kRows;
        const int zero = from.zeros ? from.zeros[at] : w.format == Format::q8 ? 128 : 8;
        for (int i = 0; i < kBlock; i++) to[c + i] = static_cast<float>(q[i] - zero) * half_to_float(from.scales[at]);
    }
}

template <class F>
void for_rows(Context& context, int64_t count, F&& f) {  // in tasks of a row block's size
    context.pool.each(static_cast<int>((count + kRows - 1) / kRows), [&](int task, int) {
        for (int64_t i = task * kRows; i < std::min<int64_t>(count, (task + 1) * kRows); i++) f(i);
    });
}

}  // namespace

void pack_rows(Context& context, const Matrix& w, int64_t first, int64_t count, const float* from) {
    const int64_t k = w.k;
    for_rows(context, count, [&](int64_t i) {
        const Place to = place_of(w, first + i);
        if (w.quantised()) return pack_quantised(w, to, k, from + i * k);
        with_type(static_cast<Type>(w.format), [&](auto example) {
            using T = decltype(example);
            T* row = reinterpret_cast<T*>(to.quants) + to.lane;
            for (int64_t c = 0; c < k; c++) row[c * kRows] = narrow<T>(from[i * k + c]);
        });
    });
}

void unpack_rows(Context& context, const Matrix& w, int64_t first, int64_t count, float* to) {
    const int64_t k = w.k;
    for_rows(context, count, [&](int64_t i) {
        const Place from = place_of(w, first + i);
        if (w.quantised()) return unpack_quantised(w, from, k, to + i * k);
        with_type(static_cast<Type>(w.format), [&](auto example) {
            using T = decltype(example);
            const T* row = reinterpret_cast<const T*>(from.quants) + from.lane;
            for (int64_t c = 0; c < k; c++) to[i * k + c] = widen(row[c * kRows]);
        });
    });
}

}  // namespace umbra
