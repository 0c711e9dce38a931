// Products of matrices in slots, and the portable reference of what each instruction set regroups.

#include "kernels/slots.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "kernels/products.h"
#include "kernels/vector.h"

namespace umbra {

SlotMatrix SlotMatrix::moved(int64_t address) const {
    const auto move = [&](const uint8_t* plane) {
        return reinterpret_cast<const uint8_t*>(reinterpret_cast<uintptr_t>(plane) + static_cast<uintptr_t>(address));
    };
    SlotMatrix one = *this;
    one.data = move(data);
    if (scales) one.scales = move(scales);
    if (offsets) one.offsets = move(offsets);
    if (bias) one.bias = move(bias);
    return one;
}

namespace {

float number_at(const uint8_t* at, Type type, int64_t i) {
    if (type == Type::f32) return reinterpret_cast<const float*>(at)[i];
    const uint16_t bits = reinterpret_cast<const uint16_t*>(at)[i];
    return type == Type::bf16 ? bf16_to_float(bits) : half_to_float(bits);
}

int nibble(const uint8_t* at, int64_t i) { return ((at[i / 2] >> i % 2 * 4 & 15) ^ 8) - 8; }

template <class Level, class Scaled>
void lines_generic(const SlotWindow& window, Level&& level, Scaled&& scaled) {
    const SlotMatrix& w = window.w;
    const int64_t blocks = w.k / kBlock;
    for (int t = 0; t < window.count; t++) {
        const Block* x = window.rows.blocks + (window.index ? window.index[t] : t) * blocks;
        for (int64_t o = window.first; o < window.end; o++) {
            float sum = 0;
            for (int64_t b = 0; b < blocks; b++) {
                int32_t dot = 0;
                for (int i = 0; i < kBlock; i++) dot += level((b * kBlock + i) * w.n + o) * x[b].q[i];
                sum += scaled(b, o, dot, x[b].sum()) * x[b].scale;
            }
            window.y[t * kSlotWindow + o - window.first] = sum;
        }
    }
}

void nibbles_generic(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    lines_generic(
        window, [&](int64_t i) { return nibble(w.data, i); },
        [&](int64_t b, int64_t o, int32_t dot, int32_t sum) {
            const int64_t at = b * kBlock / w.group * w.n + o;
            const float offset = w.offsets ? number_at(w.offsets, w.type, at) : 0;
            return number_at(w.scales, w.type, at) * (static_cast<float>(dot) + offset * static_cast<float>(sum));
        });
}

void levels_generic(const SlotWindow& window) {
    lines_generic(
        window, [&](int64_t i) { return static_cast<int8_t>(window.w.data[i]); },
        [&](int64_t, int64_t o, int32_t dot, int32_t) { return window.w.scale(o) * static_cast<float>(dot); });
}

void floats_generic(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    for (int t = 0; t < window.count; t++)
        for (int64_t o = window.first; o < window.end; o++) {
            const float* x = window.rows.x + (window.index ? window.index[t] : t) * w.k;
            float sum = 0;
            for (int64_t c = 0; c < w.k; c++) sum += number_at(w.data, w.type, c * w.n + o) * x[c];
            window.y[t * kSlotWindow + o - window.first] = sum;
        }
}

void regroup_generic(const SlotSection& section) {
    const SlotMatrix& w = section.w;
    const int64_t planes = w.planes();
    const int side = section.order == Order::signed_eights ? 8 : 4, flip = sign_bits(Format::q4, section.order) & 15;
    for (int64_t r = 0; r < kRows; r++)
        for (int64_t p = 0; p < planes; p++)
            for (int64_t lane = 0; lane < w.lanes; lane++) {
                const int64_t u = lane % w.unit, g = lane / w.unit % w.groups, s = lane / w.unit / w.groups;
                int64_t c = g * w.group + (s * planes + p) * w.unit + u;
                if (w.unit == 8) c = c / kBlock * kBlock + c % 2 * 16 + c % kBlock / 2;
                const int64_t of_half = c % 16, within = of_half % side;
                uint8_t& to = section.block[c / kBlock * 256 + (of_half - within) * kRows + r * side + within];
                const int level = (nibble(section.at + (p * w.n + r) * (w.lanes / 2), lane) + 8) ^ flip;
                to = static_cast<uint8_t>(c % kBlock < 16 ? (to & 0xf0) | level : (to & 0x0f) | level << 4);
            }
}

void regroup_scales_generic(const SlotMatrix& w, int64_t output, int64_t input, uint16_t* scales, uint8_t* zeros) {
    for (int64_t g = 0; g < w.groups; g++)
        for (int64_t r = 0; r < kRows; r++) {
            const int64_t from = (input / w.group / w.groups * w.n + output + r) * w.kept() + g, to = g * kRows + r;
            scales[to] = float_to_half(number_at(w.scales, w.type, from));
            if (zeros) zeros[to] = static_cast<uint8_t>(8 - std::lrint(number_at(w.offsets, w.type, from)));
        }
}

constexpr int64_t kMostBlock = 32768;  // bytes of a block: q4 of a section of 4096 inputs

void in_planes(const SlotWindow& window) {
    alignas(64) uint8_t block[kMostBlock], zeros[kMostBlock / 16];
    alignas(64) uint16_t scales[kMostBlock / 16];
    const SlotMatrix& w = window.w;
    const SlotKernels& slots = *window.kernels.slots;
    const int64_t section = static_cast<int64_t>(w.group) * w.groups;
    int32_t places[kSlotRows];
    float y[kSlotRows * kRows];
    Matrix part;
    part.format = Format::q4, part.order = window.kernels.order, part.group = w.group;
    part.n = kRows, part.k = static_cast<int32_t>(section);
    part.quants = block, part.scales = scales, part.zeros = w.offsets ? zeros : nullptr;
    for (int64_t first = window.first; first < window.end; first += kRows)
        for (int64_t c = 0; c < w.k / section; c++) {
            const bool last = c + 1 == w.k / section;
            const uint8_t* const next = !last                        ? w.section((c + 1) * section, first)
                                        : first + kRows < window.end ? w.section(0, first + kRows)
                                                                     : window.next;
            slots.regroup({w, w.section(c * section, first), window.kernels.order, block, next});
            const auto regroup_scales = w.type == Type::f32 ? regroup_scales_generic : slots.regroup_scales;
            regroup_scales(w, first, c * section, scales, w.offsets ? zeros : nullptr);
            for (int t = 0; t < window.count; t++)
                places[t] = static_cast<int32_t>((window.index ? window.index[t] : t) * (w.k / section) + c);
            window.kernels.product[static_cast<int>(Format::q4)](part, 0, window.rows, places, window.count, y, kRows);
            for (int t = 0; t < window.count; t++) {
                float* to = window.y + t * kSlotWindow + first - window.first;
                for (int r = 0; r < kRows; r++) to[r] = (c ? to[r] : 0) + y[t * kRows + r];
            }
        }
}

}  // namespace

const SlotKernels slots_generic{nibbles_generic, levels_generic, floats_generic, regroup_generic,
                                regroup_scales_generic};

float SlotMatrix::scale(int64_t output) const { return number_at(scales, type, output); }

void slot_products(const SlotWindow& window) {
    const SlotMatrix& w = window.w;
    if (w.in_planes()) return in_planes(window);
    const SlotKernels& slots =
        w.n < kSlotTile ? slots_generic : *window.kernels.slots;  // strips have up to 128 outputs
    (w.format == Format::q4 ? slots.nibbles : w.quantised() ? slots.levels : slots.floats)(window);
}

void halve(const SlotMatrix& w, const Rows& rows, int64_t count) {
    if (w.unit != 8) return;
    for (int64_t i = 0; i < count * (w.k / kBlock); i++) {
        auto& q = const_cast<Block&>(rows.blocks[i]).q;
        int8_t halves[kBlock];
        for (int c = 0; c < kBlock; c++) halves[c % 2 * 16 + c / 2] = q[c];
        std::memcpy(q, halves, kBlock);
    }
}

void add_slot_bias(const SlotMatrix& w, int64_t first, int64_t count, float* y) {
    if (w.bias)
        for (int64_t i = 0; i < count; i++) y[i] += number_at(w.bias, w.of_bias, first + i);
}

}  // namespace umbra
