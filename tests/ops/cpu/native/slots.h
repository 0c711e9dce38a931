// Checks of experts in slots: a mixture against plain loops.
#pragma once

#include "checks.h"
#include "kernels/dispatch.h"
#include "kernels/slots.h"
#include "kernels/vector.h"

namespace {

using namespace umbra;

// `count` random matrices of n outputs and k inputs, whose planes follow one another in each expert's block.
struct Slots {
    SlotMatrix matrix;                                              // with offsets from the matrix's place in a block
    std::vector<std::vector<uint8_t>> data, scales, offsets, bias;  // of each expert
    int64_t nbytes = 0;

    Slots(Format format, Type type, int64_t n, int64_t k, int group, int lanes, bool zeros, int count, int64_t place) {
        matrix.format = format, matrix.type = matrix.of_bias = type, matrix.n = n, matrix.k = k, matrix.group = group;
        int64_t of_scales = format == format_named("w8a8") ? n : group ? n * k / group : 0;
        if (lanes) {  // as planes.py divides them
            matrix.lanes = lanes;
            matrix.groups = std::min<int32_t>(static_cast<int32_t>(k / group), 4096 / group);
            matrix.unit = matrix.groups <= 16 ? 8 : 1;
            of_scales = matrix.sections() * n * matrix.kept();
        }
        const auto plane = [&](std::vector<std::vector<uint8_t>>& to, Type of, int64_t all, auto&& value) {
            const int64_t at = place + nbytes;
            for (int e = 0; e < count; e++) {
                std::vector<uint8_t>& bytes = to.emplace_back();
                for (int64_t i = 0; i < all; i++)
                    with_type(of, [&](auto zero) {
                        const auto one = narrow<decltype(zero)>(value());
                        const auto* first = reinterpret_cast<const uint8_t*>(&one);
                        bytes.insert(bytes.end(), first, first + sizeof one);
                    });
            }
            nbytes += (static_cast<int64_t>(to[0].size()) + 63) / 64 * 64;
            return reinterpret_cast<const uint8_t*>(at);
        };
        const auto small = [] { return random_floats(1)[0] / 64; };
        if (!matrix.quantised()) {
            matrix.data = plane(data, type, n * k, small);
            matrix.bias = plane(bias, type, n, small);
            return;
        }
        matrix.data = plane(data, Type::f32, n * k * matrix.traits().bits / 32, [] {
            const uint32_t bits = generator();
            float any;
            std::memcpy(&any, &bits, 4);
            return any;
        });
        matrix.scales = plane(scales, type, of_scales, small);
        if (zeros) matrix.offsets = plane(offsets, type, of_scales, [] { return below(16) - 7.0f; });
    }

    void write(int expert, uint8_t* block) const {
        const SlotMatrix to = matrix.moved(reinterpret_cast<int64_t>(block));
        const auto put = [&](const std::vector<std::vector<uint8_t>>& from, const uint8_t* at) {
            if (!from.empty()) std::copy(from[expert].begin(), from[expert].end(), const_cast<uint8_t*>(at));
        };
        put(data, to.data), put(scales, to.scales), put(offsets, to.offsets), put(bias, to.bias);
    }

    static double number(const std::vector<uint8_t>& from, Type type, int64_t i) {
        double value = 0;
        with_type(type, [&](auto zero) {
            decltype(zero) one;
            std::memcpy(&one, &from[i * sizeof one], sizeof one);
            value = widen(one);
        });
        return value;
    }
    // The weight of output o for input c.
    double weight(int64_t expert, int64_t o, int64_t c) const {
        const SlotMatrix& w = matrix;
        if (!w.quantised()) return number(data[expert], w.type, c * w.n + o);
        if (w.format == format_named("w8a8"))
            return static_cast<int8_t>(data[expert][c * w.n + o]) * number(scales[expert], w.type, o);
        int64_t nibble = c * w.n + o, of_group = c / w.group * w.n + o;
        if (w.lanes) {
            const int64_t section = w.group * w.groups, g = c % section / w.group, u = c % w.unit;
            const int64_t p = c % w.group / w.unit, lane = (p / w.planes() * w.groups + g) * w.unit + u;
            nibble = ((c / section * w.planes() + p % w.planes()) * w.n + o) * w.lanes + lane;
            of_group = (c / section * w.n + o) * w.kept() + g;
        }
        const int level = ((data[expert][nibble / 2] >> nibble % 2 * 4 & 15) ^ 8) - 8;
        return (level + (offsets.empty() ? 0 : number(offsets[expert], w.type, of_group))) *
               number(scales[expert], w.type, of_group);
    }
};

void check_slot_rows(const Kernels& kernels, Format format, Type type, int64_t hidden, int64_t inner, int group,
                     std::pair<int, int> lanes, bool zeros, int64_t tokens) {
    std::printf("slots of format %d, type %d, %d x %d, groups of %d in %d lanes, %d tokens\n", static_cast<int>(format),
                static_cast<int>(type), static_cast<int>(hidden), static_cast<int>(inner), group, lanes.first,
                static_cast<int>(tokens));
    constexpr int kExperts = 3, kTop = 2;
    const Slots w13(format, type, 2 * inner, hidden, group, lanes.first, zeros, kExperts, 0);
    const Slots w2(format, type, hidden, inner, group, lanes.second, zeros, kExperts, w13.nbytes);
    const int64_t block = w13.nbytes + w2.nbytes;
    std::vector<uint8_t> store(kExperts * block + 512);
    std::vector<int64_t> here;
    for (int e = 0; e < kExperts; e++) {
        uint8_t* const at = store.data() + e * block + (64 - reinterpret_cast<uintptr_t>(store.data()) % 64);
        here.push_back(reinterpret_cast<int64_t>(at));
        w13.write(e, at), w2.write(e, at);
    }
    SlotExperts slots{w13.matrix, w2.matrix, {}};
    for (int i = 0; lanes.first && i < inner; i++) slots.order.push_back(static_cast<int32_t>(i * 5 % inner));
    const std::vector<float> x = random_floats(tokens * hidden);
    std::vector<int64_t> ids(tokens * kTop), elsewhere{0, 64, 0};
    for (int64_t& id : ids) id = below(4);  // 1 is elsewhere, 3 nowhere
    std::vector<float> expected(ids.size() * hidden), first;
    const auto read = [&](std::vector<float> row) {  // as products read activations
        for (size_t b = 0; w13.matrix.quantised() && b < row.size(); b += kBlock) {
            const float most = largest({row.begin() + b, row.begin() + b + kBlock});
            for (size_t i = b; i < b + kBlock && most > 0; i++)
                row[i] = std::nearbyint(row[i] * (127 / most)) * (most / 127);
        }
        return row;
    };
    const auto bias = [](const Slots& w, int64_t e, int64_t i) {
        return w.bias.empty() ? 0 : w.number(w.bias[e], w.matrix.type, i);
    };
    float step = 0;
    for (size_t a = 0; a < ids.size(); a++) {
        const int64_t e = ids[a];
        if (e % 2) continue;
        const std::vector<float> row = read({&x[a / kTop * hidden], &x[a / kTop * hidden] + hidden});
        std::vector<float> h(inner);
        for (int64_t i = 0; i < inner; i++) {
            const int64_t gate = lanes.first ? i / 16 * 32 + i % 16 : i, up = lanes.first ? gate + 16 : inner + i;
            double g = bias(w13, e, gate), u = bias(w13, e, up);
            for (int64_t c = 0; c < hidden; c++)
                g += w13.weight(e, gate, c) * row[c], u += w13.weight(e, up, c) * row[c];
            h[lanes.first ? slots.order[i] : i] = static_cast<float>(g / (1 + std::exp(-g)) * u);
        }
        step = std::max(step, largest(h) / 127);
        h = read(h);
        for (int64_t o = 0; o < hidden; o++) {
            double sum = bias(w2, e, o);
            for (int64_t c = 0; c < inner; c++) sum += w2.weight(e, o, c) * h[c];
            expected[a * hidden + o] = static_cast<float>(sum);
        }
    }
    std::vector<uint8_t> scratch(Moe::scratch_bytes(tokens, kTop, kExperts, hidden, inner) +
                                 ids.size() * 2 * inner * sizeof(float) + 64);
    for (auto [threads, used] : {std::pair{1, tokens}, std::pair{3, tokens}, std::pair{3, int64_t{1}}}) {
        Pool pool(threads);
        Context context{pool, kernels};
        std::vector<float> rows(used * kTop * hidden);
        MoeRows{SplitMatrix{Matrix{}},
                SplitMatrix{Matrix{}},
                here.data(),
                elsewhere.data(),
                x.data(),
                ids.data(),
                rows.data(),
                scratch.data(),
                used,
                kTop,
                kExperts,
                0,
                hidden,
                inner,
                {},
                std::make_shared<SlotExperts>(slots)}
            .run(context);
        // A value of h between two steps may be rounded up here and down there.
        const float most = largest(expected), error = w13.matrix.quantised() ? 2e-3f
                                                      : type == Type::bf16   ? 1e-2f
                                                                             : 1e-5f;
        close("rows of experts in slots", rows, expected, error * most + (w13.matrix.quantised() ? step * 0.2f : 0));
        if (threads == 1) first = rows;
        same("rows on several threads, and of one token", rows, first);
    }
}

void check_slots(const Kernels& kernels) {
    for (Type type : {Type::bf16, Type::f16})
        for (bool zeros : {false, true}) {
            check_slot_rows(kernels, format_named("q4"), type, 256, 128, 32, {0, 0}, zeros, 5);
            check_slot_rows(kernels, format_named("q4"), type, 768, 96, 32, {96, 0}, zeros, 3);  // tails of w13 and w2
            check_slot_rows(kernels, format_named("q4"), type, 1024, 512, 32, {128, 128}, zeros, 2);
            check_slot_rows(kernels, format_named("q4"), type, 512, 384, 128, {128, 96}, zeros, 5);
        }
    for (int64_t tokens : {5, 90}) {  // in slabs of inputs, and not
        check_slot_rows(kernels, format_named("q4"), Type::bf16, 544, 96, 32, {0, 0}, true, tokens);
        for (Type type : {Type::f32, Type::bf16})
            check_slot_rows(kernels, format_named("w8a8"), type, 576, 96, 0, {0, 0}, false, tokens);
    }
    static constexpr Type kTypes[] = {Type::f32, Type::bf16, Type::f16};  // GCC 12 leaves a list of them without values
    for (Type type : kTypes) check_slot_rows(kernels, static_cast<Format>(type), type, 88, 70, 0, {0, 0}, false, 70);
}

}  // namespace
