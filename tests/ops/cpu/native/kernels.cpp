// One instruction set against the generic kernels, and the layers against plain loops, without Python or torch, so that
// it also runs where neither does, as under an emulator.
//
//   kernels SET                             every check; SET as in the configuration, "auto" included
//   kernels SET --count FORMAT ROWS ROUNDS  ROUNDS products of ROWS activation rows, for counting instructions
//
// Exit status: 0, 1 on a mismatch, 2 where the CPU lacks the set.

#include <array>
#include <stdexcept>

#include "delta.h"
#include "expanded.h"
#include "grids.h"
#include "kernels/dispatch.h"
#include "kernels/pack.h"
#include "kernels/records.h"
#include "runtime/probe.h"
#include "slots.h"

using namespace umbra;

namespace {

// The e4m3 float nearest to v, which is 448 at most: they grow with their bits up to 0x7e.
uint8_t nearest_f8(float v) {
    const float size = std::fabs(v);
    uint8_t above = 0;
    for (int step = 64; step; step /= 2)
        if (above + step <= 0x7e && f8_to_float(static_cast<uint8_t>(above + step - 1)) < size) above += step;
    const bool below = above && size - f8_to_float(above - 1) < f8_to_float(above) - size;
    return static_cast<uint8_t>((above - below) | (v < 0) << 7);
}

uint32_t bits_of(float v) {
    uint32_t bits;
    std::memcpy(&bits, &v, 4);
    return bits;
}

void pack(const Matrix& w, int64_t index, int64_t first, int64_t count, const float* from) {
    Pool pool(1);
    Context context{pool, kernels_generic()};
    const auto table = [](const auto* at, Kind kind, int64_t columns, int64_t step) {
        return Table{reinterpret_cast<const uint8_t*>(at), kind, columns * static_cast<int64_t>(sizeof *at), step};
    };
    if (w.traits().records()) {  // any bits, the same of the same floats
        const Matrix own = w.at(index);
        const FormatTraits& of = own.traits();
        for (int64_t row = first; row < first + count; row++)
            for (int64_t c = 0; c < own.k; c += kBlock) {
                const float* here = from + (row - first) * own.k + c;
                const int64_t block = row / kRows, lane = row % kRows;
                uint8_t* record =
                    const_cast<uint8_t*>(own.quants) + block * own.quant_stride() + c / kBlock * of.block_bytes();
                for (int i = 0; i < of.words; i++) {
                    const uint32_t word = bits_of(here[i]) * 0x9e3779b1u;
                    std::memcpy(record + 64 * i + 4 * lane, &word, 4);
                }
                for (int i = 0; i < of.bytes_more; i++)
                    record[64 * of.words + kRows * i + lane] = static_cast<uint8_t>(bits_of(here[4 + i]) >> 5 & 15);
                for (int i = 0; i < of.scale_halves() && c % own.group == 0; i++)
                    const_cast<uint16_t*>(own.nested_halves(own.scales + block * own.scale_count(), c, i))[lane] =
                        float_to_half(here[i] / 512);
            }
        return;
    }
    if (traits_of(w.format).nested()) {  // any levels and scales, the same of the same floats, of weights below 1
        const int64_t all = count * w.k, each = traits_of(w.format).sixteens() ? 16 : 32;
        const auto bits = [&](int64_t i) { return bits_of(from[i]) >> 4; };
        std::vector<uint8_t> levels(all), scales(all / each), lowest(all / 32);
        std::vector<uint16_t> d(all / w.group), dmin(d.size());
        for (int64_t i = 0; i < all; i++) levels[i] = bits(i) & ((16 << traits_of(w.format).high_bits()) - 1);
        for (size_t i = 0; i < scales.size(); i++)
            scales[i] = bits(i * each) >> 6 & (traits_of(w.format).minimums() ? 63 : 255);
        for (size_t i = 0; i < lowest.size(); i++) lowest[i] = bits(i * 32) >> 12 & 63;
        for (size_t i = 0; i < d.size(); i++) {
            d[i] = float_to_half(from[i * w.group] / (traits_of(w.format).coded() ? 1 << 14 : 1 << 11));
            dmin[i] = float_to_half(from[i * w.group + 1] / 64);
        }
        const Given given{table(levels.data(), Kind::u8, w.k, 4),
                          table(scales.data(), Kind::u8, w.k / each, 1),
                          table(lowest.data(), Kind::u8, w.k / 32, 1),
                          w.group,
                          0,
                          table(d.data(), Kind::f16, w.k / w.group, 2),
                          table(dmin.data(), Kind::f16, w.k / w.group, 2)};
        pack_rows(context, w, {index, first, 1}, count, w.k, given, true);
        return;
    }
    if (w.traits().f8_scales()) {  // likewise
        std::vector<uint8_t> levels(count * w.k), scales(levels.size() / 16);
        for (size_t i = 0; i < levels.size(); i++) levels[i] = bits_of(from[i]) >> 4 & 15;
        for (size_t i = 0; i < scales.size(); i++)
            scales[i] = static_cast<uint8_t>(0x20 + (bits_of(from[i * 16]) >> 6) % 24);
        Given given{table(levels.data(), Kind::u8, w.k, 4), table(scales.data(), Kind::u8, w.k / 16, 1), {}, w.k};
        given.of_scales = table(from, Kind::f32, w.k, 0);
        pack_rows(context, w, {index, first, 1}, count, w.k, given, true);
        return;
    }
    if (w.traits().scales != Scales::floats) {
        pack_rows(context, w, {index, first, 1}, count, w.k, {table(from, Kind::f32, w.k, 4), {}, {}}, false);
        return;
    }
    std::vector<uint8_t> values(count * w.k);
    std::vector<float> scales(values.size() / w.group);
    for (size_t g = 0; g < scales.size(); g++) {
        float most = 0;
        for (int c = 0; c < w.group; c++) most = std::max(most, std::fabs(from[g * w.group + c]));
        scales[g] = most / (w.traits().storage == Storage::e4m3 ? 448 : 127);
        for (int c = 0; c < w.group; c++) {
            const float value = from[g * w.group + c] / scales[g];
            values[g * w.group + c] =
                w.traits().storage == Storage::e4m3 ? nearest_f8(value) : static_cast<uint8_t>(std::lround(value));
        }
    }
    const Kind kind = w.traits().storage == Storage::e4m3 ? Kind::f8 : Kind::i8;
    const Given given{
        table(values.data(), kind, w.k, 4), table(scales.data(), Kind::f32, w.k / w.group, 4), {}, w.group};
    pack_rows(context, w, {index, first, 1}, count, w.k, given, true);
}

// `copies` matrices in an order, one after another in each plane, with memory of their own.
struct Weights {
    Matrix matrix;
    std::vector<uint8_t> quants, zeros;
    std::vector<uint16_t> scales;

    Weights(Format format, Order order, int n, int k, int group, bool with_zeros, int copies = 1) {
        matrix.format = format;
        matrix.order = order;
        matrix.n = (n + kRows - 1) / kRows * kRows;
        matrix.k = k;
        matrix.group = traits_of(format).scales == Scales::none        ? 0
                       : traits_of(format).scales == Scales::exponents ? kBlock
                                                                       : group;
        const size_t blocks = static_cast<size_t>(matrix.n / kRows) * copies;
        quants.resize(blocks * matrix.quant_stride() + 64);
        scales.resize(blocks * matrix.scale_count());
        zeros.resize(with_zeros ? scales.size() : 0);
        matrix.quants = quants.data() + (64 - reinterpret_cast<uintptr_t>(quants.data()) % 64) % 64;
        matrix.scales = scales.data();
        matrix.zeros = with_zeros ? zeros.data() : nullptr;
    }

    // Any quants, a quarter of them extreme, in some rows all (0x77 are mxfp4's largest); `unit` makes all scales 1, so that
    // integer sums come out exactly.
    void randomise(bool unit) {
        if (matrix.traits().storage == Storage::e4m3) {
            for (uint8_t& q : quants) q = static_cast<uint8_t>(below(2) << 7 | below(0x7f));
            float* floats = reinterpret_cast<float*>(scales.data());
            for (size_t i = 0; i < scales.size() / 2; i++) floats[i] = random_floats(1)[0] / 64;
            return;
        }
        if (!matrix.quantised()) return pack(matrix, 0, 0, matrix.n, random_floats(matrix.n * matrix.k).data());
        uint8_t* at = const_cast<uint8_t*>(matrix.quants);
        for (uint8_t* q = at; q < at + matrix.n / kRows * matrix.quant_stride(); q++) {
            *q = static_cast<uint8_t>(below(4) ? below(256) : below(2) * 255);
            if (const int row = (q - at) % 64 / 4; row < 3) *q = std::array<uint8_t, 3>{0, 255, 0x77}[row];
        }
        if (matrix.traits().scales == Scales::exponents) {
            uint8_t* bytes = reinterpret_cast<uint8_t*>(scales.data());
            for (size_t i = 0; i < 2 * scales.size(); i++) bytes[i] = static_cast<uint8_t>(unit ? 127 : 115 + below(8));
            return;
        }
        if (matrix.traits().f8_scales()) {
            uint8_t* bytes = reinterpret_cast<uint8_t*>(scales.data());
            for (size_t i = 0; i < 2 * scales.size(); i++)
                bytes[i] = static_cast<uint8_t>(unit ? 0x38 : 0x20 + below(24));
            for (int64_t b = 0; b < matrix.n / kRows; b++)
                for (int r = 0; r < kRows; r++)
                    const_cast<float*>(matrix.float_scales(b))[r] = unit ? 1.0f : random_floats(1)[0] / 16;
            return;
        }
        if (traits_of(matrix.format).nested()) {
            for (int64_t b = 0; b < matrix.n / kRows; b++)
                for (int64_t c = 0; c < matrix.k; c += kBlock) {
                    uint16_t* of_block = scales.data() + b * matrix.scale_count();
                    for (int i = 0; i < traits_of(matrix.format).scale_halves() * kRows; i++)
                        const_cast<uint16_t*>(matrix.nested_halves(of_block, c, 0))[i] =
                            float_to_half(unit ? 1.0f : random_floats(1)[0] / 64);
                    for (int i = 0; i < traits_of(matrix.format).scale_bytes() * kRows; i++)
                        const_cast<uint8_t*>(matrix.nested_bytes(of_block, c, 0))[i] =
                            static_cast<uint8_t>(below(unit                                  ? 4
                                                       : traits_of(matrix.format).minimums() ? 64
                                                                                             : 256));
                }
            return;
        }
        if (matrix.traits().scales == Scales::floats) {
            float* floats = reinterpret_cast<float*>(scales.data());
            for (size_t i = 0; i < scales.size() / 2; i++) floats[i] = unit ? 1.0f : random_floats(1)[0] / 64;
            return;
        }
        for (uint16_t& s : scales) s = float_to_half(unit ? 1.0f : random_floats(1)[0] / 64);
        for (uint8_t& z : zeros) z = static_cast<uint8_t>(below(matrix.traits().most() + 1));
    }

    std::vector<float> dequantised(int copies = 1) const {
        std::vector<float> values(static_cast<size_t>(matrix.n) * matrix.k * copies);
        Pool pool(1);
        Context context{pool, kernels_generic()};
        for (int64_t i = 0; i < copies; i++)
            unpack_rows(context, matrix, {i, 0, 1}, matrix.n, values.data() + i * matrix.n * matrix.k);
        return values;
    }
};

// Activation rows and their quantised copies.
struct Activations {
    std::vector<float> x;
    std::vector<Block> blocks;

    Activations(const Kernels& kernels, const std::vector<float>& values) : x(values), blocks(x.size() / kBlock) {
        kernels.quantise(x.data(), static_cast<int>(blocks.size()), blocks.data());
    }
    Rows rows() const { return {x.data(), blocks.data()}; }
};

// Activations; for bfloat16 those that sets which round them to it leave as they are.
std::vector<float> inputs(Format format, int64_t count) {
    std::vector<float> x = random_floats(count);
    for (float& v : x)
        if (format == format_named("bfloat16")) v = widen(narrow<Bf16>(v));
    return x;
}

// Activation rows as products by w read them: where it is quantised, rounded to steps of each block's largest / 127.
std::vector<float> as_read(const Matrix& w, std::vector<float> x) {
    for (size_t start = 0; w.quantised() && start < x.size(); start += kBlock) {
        float most = 0;
        for (size_t i = start; i < start + kBlock; i++) most = std::max(most, std::fabs(x[i]));
        for (size_t i = start; i < start + kBlock && most > 0; i++)
            x[i] = std::nearbyint(x[i] * (127 / most)) * (most / 127);
    }
    return x;
}

constexpr size_t kStride = kRows + 3;  // what lies between and behind the results must stay as it is

std::vector<float> product(const Kernels& kernels, const Matrix& w, const Rows& rows, const int32_t* index, int count) {
    std::vector<float> y((count + 1) * kStride, 0.5f);
    kernels.product[static_cast<int>(w.format)](w, 1, rows, index, count, y.data(), kStride);
    return y;
}

void check_products(const Kernels& kernels, Format format, int k, int group, bool zeros, bool unit) {
    std::printf("product %s, %d columns, groups of %d%s%s\n", traits_of(format).name, k, group, zeros ? ", zeros" : "",
                unit ? ", exact" : "");
    constexpr int kTokens = 11;
    Weights w(format, kernels.order, 2 * kRows, k, group, zeros);
    w.randomise(unit);
    std::vector<float> x = inputs(format, kTokens * k);
    std::fill_n(x.begin(), k, 1.0f);  // with a row of extreme quants, what sums of 16 bits hold at most
    Activations activations(kernels_generic(), x);
    if (unit)
        for (Block& block : activations.blocks) block.scale = 1.0f;
    const Rows rows = activations.rows();
    int32_t index[kTokens];
    for (int32_t& i : index) i = below(kTokens);
    for (int count = 0; count <= kTokens; count++)
        for (const int32_t* chosen : std::initializer_list<const int32_t*>{nullptr, index}) {
            const std::vector<float> actual = product(kernels, w.matrix, rows, chosen, count);
            const std::vector<float> expected = product(kernels_generic(), w.matrix, rows, chosen, count);
            if (unit)
                same("product", actual, expected);
            else
                close("product", actual, expected, 1e-5f * largest(expected));
#if defined(__x86_64__)
            if (kernels.name != kernels_generic().name && w.matrix.quantised())
                same("product of any x86 set", actual, product(kernels_avx2(), w.matrix, rows, chosen, count));
#endif
            for (int t = 0; t < count; t++) {
                const int32_t row = chosen ? chosen[t] : t;
                const auto beside = actual.begin() + t * kStride;
                same("a row alone and beside others", std::vector<float>(beside, beside + kRows),
                     product(kernels, w.matrix, rows, &row, 1));
            }
        }
}

// Row blocks at once against one after the other, on x86 by another set.
void check_several(const Kernels& kernels, Format format, int k, int group, bool zeros) {
    const Products several = kernels.several[static_cast<int>(format)];
    if (!several) return;
#if defined(__x86_64__)
    const Kernels& other = format == format_named("bfloat16") ? kernels : kernels_avx2();
    const Product single = other.product[static_cast<int>(format)];
#else
    const Product single = kernels.product[static_cast<int>(format)];
#endif
    std::printf("several %s, %d columns, groups of %d%s\n", traits_of(format).name, k, group, zeros ? ", zeros" : "");
    constexpr int kBlocks = 6, kTokens = 41, kAll = (kBlocks - 1) * kRows + 3;
    Weights w(format, kernels.order, kBlocks * kRows, k, group, zeros);
    w.randomise(false);
    const Activations activations(kernels, random_floats(kTokens * k));
    int32_t index[kTokens];
    for (int32_t& i : index) i = below(kTokens);
    for (int count : {0, 1, 4, 7, 8, 16, 23, 24, 40, 41})
        for (const int32_t* chosen : std::initializer_list<const int32_t*>{nullptr, index})
            for (int blocks = 0; blocks < kBlocks; blocks++) {
                std::vector<float> actual((kTokens + 1) * kAll, 0.5f), expected(actual);
                several(w.matrix, 1, blocks, activations.rows(), chosen, count, actual.data(), kAll);
                for (int b = 0; b < blocks; b++)
                    single(w.matrix, 1 + b, activations.rows(), chosen, count, expected.data() + b * kRows, kAll);
                same("row blocks at once", actual, expected);
            }
}

void check_quantise(const Kernels& kernels) {
    std::puts("quantise");
    std::vector<float> x = random_floats(40 * kBlock);
    std::fill(x.begin(), x.begin() + kBlock, 0.0f);
    for (int i = 0; i < kBlock; i++) {
        x[kBlock + i] = i == 5 ? -127.0f : i - 16.5f;  // the inverse is 1: halves go to even
        x[2 * kBlock + i] *= 1e-30f;
        x[3 * kBlock + i] *= 1e30f;
        x[4 * kBlock + i] = -0.0f;
    }
    const Activations actual(kernels, x), expected(kernels_generic(), x);
    for (size_t b = 0; b < actual.blocks.size(); b++)
        if (std::memcmp(&actual.blocks[b], &expected.blocks[b], sizeof(Block)) != 0)
            fail("scale of quantised block", b, actual.blocks[b].scale, expected.blocks[b].scale);
}

void check_pack(Format format, Order order, int group) {
    std::printf("pack and unpack %s, groups of %d\n", traits_of(format).name, group);
    constexpr int kN = 37, kK = 256;
    Weights w(format, order, kN, kK, group, false);
    const std::vector<float> from = random_floats(kN * kK);
    for (int row = 0; row < kN; row += 5)  // piece by piece, as a loader does
        pack(w.matrix, 0, row, std::min(5, kN - row), from.data() + row * kK);
    std::vector<float> back = w.dequantised();
    back.resize(from.size());  // padding is left out
    const float steps[] = {0, 1.0f / 256, 1.0f / 2048, 1.0f / 254, 1.0f / 8, 1.0f / 16, 1.0f / 4};  // up to 1
    close("unpacked", back, from,
          steps[static_cast<int>(format == format_named("w8a8") ? format_named("q8") : format)] *
              1.01f);  // scales are rounded too
}

// The same weights in every order: equal values, equal products by the generic kernels, and equal ones by all of ARM's
// sets, each of which reads one order.
void check_orders(Format format, bool zeros) {
    std::printf("orders of %s%s\n", traits_of(format).name, zeros ? ", zeros" : "");
    constexpr int kK = 256, kTokens = 7;
    const std::vector<float> from = random_floats(2 * kRows * kK);
    const Activations activations(kernels_generic(), random_floats(kTokens * kK));
    const auto packed = [&](Order order) {
        Weights w(format, order, 2 * kRows, kK, 64, zeros);
        pack(w.matrix, 0, 0, w.matrix.n, from.data());
        return w;
    };
    const auto times = [&](const Kernels& kernels, const Weights& w) {
        return product(kernels, w.matrix, activations.rows(), nullptr, kTokens);
    };
    const Weights fours = packed(Order::fours);
    for (Order order : {Order::signed_fours, Order::signed_eights}) {
        const Weights w = packed(order);
        same("values in another order", w.dequantised(), fours.dequantised());
        same("product in another order", times(kernels_generic(), w), times(kernels_generic(), fours));
    }
    std::vector<float> first;
    for (const std::string& name : usable_sets()) {
        const Kernels& kernels = choose_kernels(name);
        if (kernels.order == Order::fours) continue;
        const std::vector<float> of_set = times(kernels, packed(kernels.order));
        if (first.empty()) first = of_set;
        same("product by another set", of_set, first);
    }
}

// Rows of w (k long) times a row x.
double dot(const float* w, const float* x, int64_t k) {
    double sum = 0;
    for (int64_t c = 0; c < k; c++) sum += static_cast<double>(w[c]) * x[c];
    return sum;
}

void check_linear(const Kernels& kernels, Format format, int64_t tokens) {
    std::printf("linear %s, %d tokens\n", traits_of(format).name, static_cast<int>(tokens));
    constexpr int kN = 101, kK = 256;
    Weights w(format, kernels.order, kN, kK, 64, false);
    pack(w.matrix, 0, 0, kN, random_floats(kN * kK).data());
    const std::vector<float> x = inputs(format, tokens * kK), bias = random_floats(kN), dense = w.dequantised();
    const std::vector<float> read = as_read(w.matrix, x);
    std::vector<float> expected(tokens * kN), first;
    for (int64_t t = 0; t < tokens; t++)
        for (int r = 0; r < kN; r++)
            expected[t * kN + r] = static_cast<float>(dot(&dense[r * kK], &read[t * kK], kK)) + bias[r];
    std::vector<uint8_t> scratch(Scratch::bytes(tokens, kK));
    for (int threads : {1, 2, 5}) {
        Pool pool(threads);
        Context context{pool, kernels};
        std::vector<float> out(tokens * kN, 0.5f);
        Linear{w.matrix, x.data(), bias.data(), out.data(), Scratch{scratch.data()}, tokens, kN}.run(context);
        close("linear", out, expected, 1e-4f);
        if (threads == 1) first = out;
        same("linear on several threads", out, first);
    }
}

void check_moe(const Kernels& kernels, Format format, int64_t tokens, bool skewed) {
    std::printf("moe %s, %d tokens%s\n", traits_of(format).name, static_cast<int>(tokens),
                skewed ? ", all to one expert" : "");
    constexpr int kExperts = 5, kFirst = 2, kHidden = 96, kInner = 64, kTop = 3;
    Weights w13(format, kernels.order, 2 * kInner, kHidden, 32, false, kExperts),
        w2(format, kernels.order, kHidden, kInner, 64, false, kExperts);
    for (int e = 0; e < kExperts; e++) {
        pack(w13.matrix, e, 0, 2 * kInner, random_floats(2 * kInner * kHidden).data());
        pack(w2.matrix, e, 0, kHidden, random_floats(kHidden * kInner).data());
    }
    const std::vector<float> x = random_floats(tokens * kHidden), weights = random_floats(tokens * kTop);
    std::vector<int64_t> ids(tokens * kTop);
    for (int64_t& id : ids) id = skewed ? kFirst + 3 : below(8);  // 0, 1 and 7 are elsewhere; repeats happen
    if (tokens > 2) ids[4] = -1;

    const std::vector<float> dense13 = w13.dequantised(kExperts), dense2 = w2.dequantised(kExperts);
    const std::vector<float> read = as_read(w13.matrix, x);
    float step = 0;  // the largest of h's rounding, weighted
    std::vector<float> expected(tokens * kHidden), first;
    for (int64_t a = 0; a < tokens * kTop; a++) {
        const int64_t e = ids[a] - kFirst;
        if (e < 0 || e >= kExperts) continue;
        const float* row = &read[a / kTop * kHidden];
        std::vector<float> h(kInner);
        for (int i = 0; i < kInner; i++) {  // sixteen rows of gate, sixteen of up, in turn
            const float* gate = &dense13[(e * 2 * kInner + i / kRows * 2 * kRows + i % kRows) * kHidden];
            const double g = dot(gate, row, kHidden), u = dot(gate + kRows * kHidden, row, kHidden);
            h[i] = static_cast<float>(g / (1 + std::exp(-g)) * u);
        }
        step = std::max(step, std::fabs(weights[a]) * largest(h) / 127);
        h = as_read(w2.matrix, h);
        for (int r = 0; r < kHidden; r++)
            expected[a / kTop * kHidden + r] +=
                weights[a] * static_cast<float>(dot(&dense2[(e * kHidden + r) * kInner], h.data(), kInner));
    }
    std::vector<uint8_t> scratch(Moe::scratch_bytes(tokens, kTop, kExperts, kHidden, kInner));
    for (int threads : {1, 2, 5}) {
        Pool pool(threads);
        Context context{pool, kernels};
        std::vector<float> out(tokens * kHidden, 0.5f);
        Moe{w13.matrix, w2.matrix, x.data(), weights.data(), ids.data(), out.data(), scratch.data(),
            tokens,     kTop,      kExperts, kFirst,         kHidden,    kInner,     {}}
            .run(context);
        // A value of h between two steps may be rounded up here and down there.
        const float error = (format == format_named("bfloat16") ? 0.01f : 1e-5f) * std::max(1.0f, largest(expected));
        close("moe", out, expected, error + (w2.matrix.quantised() ? step * largest(dense2) : 0));
        if (threads == 1) first = out;
        same("moe on several threads", out, first);
    }
}

void check_format(const Kernels& kernels, Format format) {
    if (traits_of(format).scales == Scales::none) {
        for (int k : {1, 35, 256, 1025}) check_products(kernels, format, k, 0, false, false);
        check_several(kernels, format, 301, 0, false);
    } else if (traits_of(format).storage == Storage::e4m3) {
        for (int group : {32, 64, 128}) check_products(kernels, format, 384, group, false, false);
        check_products(kernels, format, 96, 96, false, false);
    } else if (traits_of(format).nested()) {
        for (int group : {32, 128})
            for (bool unit : {true, false})
                if (!unit || !traits_of(format).records())  // whose sums are not whole
                    check_products(kernels, format, 384, group, false, unit);
        if (traits_of(format).records()) check_products(kernels, format, 2048, 256, false, false);
        check_several(kernels, format, 512, 256, false);
    } else if (!traits_of(format).zeros()) {
        for (bool unit : {true, false}) check_products(kernels, format, 384, 32, false, unit);
        check_several(kernels, format, 320, 32, false);
    } else {
        for (int group : {32, 64, 128})
            for (bool zeros : {false, true})
                for (bool unit : {true, false}) check_products(kernels, format, 384, group, zeros, unit);
        check_products(kernels, format, 96, 96, true, true);  // a single group
        for (bool zeros : {false, true}) check_several(kernels, format, 320, 64, zeros);
    }
    for (int group : {32, 128})
        if (!traits_of(format).nested() && !traits_of(format).f8_scales()) check_pack(format, kernels.order, group);
    for (int64_t tokens : {0, 1, 3, 70}) check_linear(kernels, format, tokens);
    for (int64_t tokens : {0, 1, 7, 70}) check_moe(kernels, format, tokens, false);
    check_moe(kernels, format, 30, true);
}

void check_all(const Kernels& kernels) {
    std::printf("kernels %s\n", kernels.name);
    set_grids();
    constexpr int kLate = static_cast<int>(format_named("f8"));
    for (int i = 0; i < kLate; i++) check_format(kernels, static_cast<Format>(i));
    check_quantise(kernels);
    for (Type type : {Type::f32, Type::bf16, Type::f16, Type::i8})
        for (int page_size : {16, 6}) check_attention(kernels, type, page_size, 64);
    for (Type type : {Type::f32, Type::bf16}) check_attention(kernels, type, 16, 40);
    std::puts("probe");
    Pool pool(2);
    Context context{pool, kernels};
    if (mac_probe(context, 1) <= 0) fail("multiply-adds of the probe", 0, 0, 1);
    // Late: attention's check of int8 caches depends on the numbers drawn before. A value next to a half, about one in a
    // million, is rounded the other way where product and addition are fused.
    for (int i = kLate; i < kFormats; i++)
        if (!kFormatTraits[i].expanded()) check_format(kernels, static_cast<Format>(i));
    for (int i = 0; i < kFormats; i++)
        for (bool zeros : {false, true})
            if (traits_of(static_cast<Format>(i)).quantised() && !kFormatTraits[i].expanded() &&
                (!zeros || kFormatTraits[i].zeros()))
                check_orders(static_cast<Format>(i), zeros);
    for (Type type : {Type::f32, Type::bf16, Type::f16, Type::i8}) check_expanded(kernels, type, 48, 10, 21, 40);
    check_expanded(kernels, Type::bf16, 512, 64, 128, 256);
    check_delta(kernels, 2, 6, 24, 48);
    check_delta(kernels, 1, 2, 128, 64);
    check_delta(kernels, 3, 3, 24, 48, true);
    check_delta(kernels, 1, 2, 128, 64, true, -5.0f);
    for (Type type : {Type::f32, Type::bf16, Type::f16, Type::i8}) check_attention(kernels, type, 6, 48, 10);
    check_slots(kernels);
    std::puts("ok");
}

int count(const Kernels& kernels, const std::string& name, int rows, int rounds) {
    int format = 0;
    while (format < kFormats && name != kFormatTraits[format].name) format++;
    if (format == kFormats || rows < 1 || rounds < 1) return 2;
    constexpr int kN = 64, kK = 2048;
    const Weights w(static_cast<Format>(format), kernels.order, kN, kK, 32, false);
    const Activations activations(kernels, random_floats(rows * kK));
    std::vector<float> y(rows * kRows);
    for (int round = 0; round < rounds; round++)
        for (int block = 0; block < kN / kRows; block++)
            kernels.product[format](w.matrix, block, activations.rows(), nullptr, rows, y.data(), kRows);
    std::printf("%d weights a round\n", kN * kK);
    return 0;
}

}  // namespace

int main(int argc, char** argv) {
    if (argc != 2 && (argc != 6 || std::strcmp(argv[2], "--count") != 0)) {
        std::fputs("usage: kernels SET [--count FORMAT ROWS ROUNDS]\n", stderr);
        return 2;
    }
    try {
        const Kernels& kernels = choose_kernels(argv[1]);
        if (argc == 6) return count(kernels, argv[3], std::atoi(argv[4]), std::atoi(argv[5]));
        check_all(kernels);
    } catch (const std::invalid_argument& error) {
        std::fprintf(stderr, "%s\n", error.what());
        return 2;
    }
}
