// Packs rows that a checkpoint's file may hold into every format and reads them back. Sizes are those that
// ops/cpu/matrix.py lets pass; every byte of the tables, and where they lie, is the fuzzer's.

#include <cmath>

#include "input.h"
#include "kernels/pack.h"

using namespace umbra;

namespace {

int64_t bits_of(Kind kind) {
    switch (kind) {
        case Kind::f32: return 32;
        case Kind::bf16:
        case Kind::f16: return 16;
        case Kind::u4:
        case Kind::awq: return 4;
        default: return 8;
    }
}

// A table of (rows, columns) elements of `bytes` each, in either order, at any alignment, with gaps between its rows.
struct Elements {
    std::vector<uint8_t> memory;
    Table table;

    Elements(Input& input, Kind kind, int64_t bytes, int64_t rows, int64_t columns) {
        const bool across = input.flag();
        const int64_t inner = across ? rows : columns, outer = across ? columns : rows;
        const int64_t stride = inner * bytes + input.range<int64_t>(0, 9), shift = input.range<int64_t>(0, 7);
        memory = input.values<uint8_t>(shift + (outer ? (outer - 1) * stride + inner * bytes : 0));
        table = {memory.data() + shift, kind, across ? bytes : stride, across ? stride : bytes};
    }
};

// Rows of values: neighbours of a row side by side; words of eight levels in either order.
struct Values {
    std::vector<uint8_t> memory;
    Table table;

    Values(Input& input, Kind kind, int64_t rows, int64_t columns) {
        if (kind == Kind::awq || kind == Kind::u4 || (kind == Kind::u8 && input.flag())) {
            const int64_t each = 32 / bits_of(kind);
            const bool awq = kind == Kind::awq;
            Elements words(input, kind, 4, awq ? (rows + each - 1) / each : rows, awq ? columns : columns / each);
            memory = std::move(words.memory), table = words.table;
            return;
        }
        const int64_t row = columns * bits_of(kind) / 8, stride = row + input.range<int64_t>(0, 9);
        const int64_t shift = input.range<int64_t>(0, 7);
        memory = input.values<uint8_t>(shift + (rows ? (rows - 1) * stride + row : 0));
        table = {memory.data() + shift, kind, stride, 4};
    }
};

struct Type256 {
    Ggml type;
    int64_t bytes;  // of 256 columns
    Format own;
};
constexpr Type256 kTypes[] = {{Ggml::q4_0, 144, format_named("q4")},     {Ggml::q4_1, 160, format_named("q4_k")},
                              {Ggml::q5_0, 176, format_named("q5_k")},   {Ggml::q5_1, 192, format_named("q5_k")},
                              {Ggml::q8_0, 272, format_named("q8")},     {Ggml::q4_k, 144, format_named("q4_k")},
                              {Ggml::q5_k, 176, format_named("q5_k")},   {Ggml::q6_k, 210, format_named("q6_k")},
                              {Ggml::iq4_nl, 144, format_named("iq4")},  {Ggml::iq4_xs, 136, format_named("iq4")},
                              {Ggml::mxfp4, 136, format_named("mxfp4")}, {Ggml::q2_k, 84, format_named("float32")},
                              {Ggml::q3_k, 110, format_named("float32")}};

float sum_of(const std::vector<float>& values) {
    float sum = 0;
    for (float value : values) sum += value * 0;  // NaN if one is no finite number
    return sum;
}

struct Target {
    std::vector<Plane> planes;
    std::vector<size_t> sizes;
    std::vector<Matrix> parts;

    Target(Format format, Order order, Pool& pool, int64_t count, int64_t blocks, int64_t k, int64_t group,
           bool zeros) {
        for (int node = 0; node < pool.nodes(); node++) {
            Matrix part;
            part.format = format;
            part.order = order;
            const int64_t here =
                pool.first(static_cast<int>(blocks), node + 1) - pool.first(static_cast<int>(blocks), node);
            part.n = static_cast<int32_t>(here * kRows);
            part.k = static_cast<int32_t>(k);
            part.group = static_cast<int32_t>(group);
            part.quants = plane(count * here * part.quant_stride());
            if (group) part.scales = reinterpret_cast<const uint16_t*>(plane(count * here * part.scale_count() * 2));
            if (zeros) part.zeros = plane(count * here * part.scale_count());
            parts.push_back(part);
        }
    }
    uint8_t* plane(size_t bytes) {
        planes.emplace_back(bytes);
        sizes.push_back(bytes);
        return planes.back().at();
    }
    std::vector<uint8_t> bytes() const {
        std::vector<uint8_t> all;
        for (size_t i = 0; i < planes.size(); i++) all.insert(all.end(), planes[i].at(), planes[i].at() + sizes[i]);
        return all;
    }
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    Input input(data, size);
    Pool& pool = pool_of(input);
    Context context{pool, kernels_generic()};

    const Kind kind = static_cast<Kind>(input.range(0, 7));
    if (input.range(0, 7) == 7) {  // a table of floats: only float kinds reach fill_table
        const Kind from = static_cast<Kind>(input.range(0, 2));
        const Type type = static_cast<Type>(input.range(0, 2));
        const int64_t rows = input.range<int64_t>(0, 5), columns = input.range<int64_t>(0, 40);
        const Values values(input, from, rows, columns);
        Plane to(rows * columns * (type == Type::f32 ? 4 : 2));
        fill_table(context, to.at(), type, rows, columns, {values.table, {}, {}});
        return 0;
    }

    if (input.range(0, 7) == 7) {  // blocks of a GGUF file, kept where a format keeps their type
        const Type256& type = kTypes[input.range(0, static_cast<int>(std::size(kTypes)) - 1)];
        const int64_t whole = input.range<int64_t>(1, 3), skipped = 32 * input.range<int64_t>(0, 7);
        const int64_t k = whole * 256 - skipped, rows = input.range<int64_t>(0, 20);
        const int64_t row = whole * type.bytes, shift = input.range<int64_t>(0, 7);
        const std::vector<uint8_t> memory = input.values<uint8_t>(shift + rows * row);
        Given given;
        given.blocks = {memory.data() + shift, type.type, row, skipped};
        const bool keep = type.own != format_named("float32") && input.flag();
        const Format format = keep ? type.own : static_cast<Format>(input.range(0, 4));
        Target target(format, static_cast<Order>(input.range(0, 2)), pool, 1, 2, k,
                      traits_of(format).scales != Scales::none ? 32 : 0, false);
        const SplitMatrix w(target.parts);
        pack_rows(context, w, {0, 3, 1}, rows, k, given, keep);
        std::vector<float> back(rows * k);
        unpack_rows(context, w, {0, 3, 1}, rows, back.data());
        std::vector<float> table(rows * k);
        if (rows) fill_table(context, table.data(), Type::f32, rows, k, given);
        if (keep || format == format_named("float32"))
            demand(!rows || memcmp(back.data(), table.data(), rows * k * 4) == 0 || std::isnan(sum_of(back)),
                   "blocks mean the same in a matrix and in a table");
        return 0;
    }

    const bool levels = kind >= Kind::f8;
    const Format kept = kind == Kind::f8     ? format_named("f8")
                        : bits_of(kind) == 8 ? format_named("q8")
                                             : format_named("q4");
    const bool keep = levels && input.flag();
    const Format format = keep ? kept : static_cast<Format>(input.range(0, 4));
    const bool quantised = traits_of(format).scales != Scales::none;
    const int64_t group = quantised ? input.one_of({32, 64, 128}) : 0;
    // Levels come in groups that divide their columns; where they are kept, theirs contain those of the matrix.
    const int64_t unit = levels ? std::max<int64_t>(group, 32) * input.range<int64_t>(1, 2) : 0;
    const int64_t multiple = std::max(group, unit);
    const int64_t k = multiple ? multiple * input.range<int64_t>(1, 3) : input.range<int64_t>(1, 80);
    const int64_t columns = quantised || levels ? k : input.range<int64_t>(0, k);
    const bool zeros = format == format_named("q4") && input.flag();
    const bool given_zeros = levels && kind != Kind::f8 && (!keep || zeros) && input.flag();
    const Order order = static_cast<Order>(input.range(0, 2));

    const int64_t step = input.range<int64_t>(1, 2), index = input.range<int64_t>(0, 1);
    const int64_t first = input.range<int64_t>(0, step == 2 ? 1 : 20) * (step == 2 ? kRows : 1);
    const int64_t rows = input.range<int64_t>(0, 40);
    const int64_t last = first / kRows + ((first % kRows + rows + kRows - 1) / kRows) * step;
    Target target(format, order, pool, index + 1, last + 1, k, group, zeros);
    const SplitMatrix w(target.parts);

    const Values values(input, kind, rows, columns);
    Given given{values.table, {}, {}, unit, kind == Kind::f8 ? 0 : 1 << (bits_of(kind) - 1)};
    const Kind scale = static_cast<Kind>(input.range(0, 2));
    const Elements scales(input, scale, scale == Kind::f32 ? 4 : 2, rows, unit ? columns / unit : 0);
    if (levels) given.scales = scales.table;
    const bool words = given_zeros && bits_of(kind) == 4 && input.flag();
    const Elements points(input, words ? Kind::awq : Kind::u8, words ? 4 : 1, words ? (rows + 7) / 8 : rows,
                          unit ? columns / unit : 0);
    if (given_zeros) given.zeros = points.table;

    const RowRange where{index, first, step};
    pack_rows(context, w, where, rows, columns, given, keep);
    std::vector<float> back(rows * k);
    unpack_rows(context, w, where, rows, back.data());
    // The same rows again change nothing.
    const std::vector<uint8_t> once = target.bytes();
    pack_rows(context, w, where, rows, columns, given, keep);
    demand(target.bytes() == once, "packing the same rows twice gives the same bytes");
    if (format == format_named("float32") && kind == Kind::f32)
        for (int64_t r = 0; r < rows && columns; r++)
            demand(memcmp(back.data() + r * k, values.table.at + r * values.table.row, columns * 4) == 0,
                   "floats come back unchanged");
    return 0;
}
