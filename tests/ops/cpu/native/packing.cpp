// Packs rows of every kind into every format and prints a number for each, which depends on all bytes that were written.
// Every instruction set must print the same numbers: what a file holds decides how it is packed, not the CPU.

#include "checks.h"
#include "grids.h"
#include "kernels/pack.h"

using namespace umbra;

namespace {

constexpr int kN = 45, kK = 256, kGroup = 64;

uint64_t hash(const std::vector<uint8_t>& bytes, uint64_t h) {
    for (uint8_t byte : bytes) h = (h ^ byte) * 0x100000001b3u;
    return h;
}

// Random bytes that are rows of `kind`: no NaN and no infinity, many ties of rounding.
std::vector<uint8_t> rows_of(Kind kind) {
    std::vector<uint8_t> bytes(kN * kK * 4 + 64);
    for (uint8_t& byte : bytes) byte = static_cast<uint8_t>(below(256));
    if (kind == Kind::f8)
        for (uint8_t& byte : bytes) byte = (byte & 0x7f) == 0x7f ? 0 : byte;
    for (size_t i = 0; i + 4 <= bytes.size() && kind < Kind::f8; i += 4) {
        const float value = below(4) ? random_floats(1)[0] : static_cast<float>(below(65) - 32) / 32;
        const uint16_t half = float_to_half(value);
        uint32_t word;
        std::memcpy(&word, &value, 4);
        if (kind != Kind::f32) word = kind == Kind::f16 ? half << 16 | half : word >> 16 << 16 | word >> 16;
        std::memcpy(&bytes[i], &word, 4);
    }
    return bytes;
}

uint64_t packed(Format format, Kind kind, const Given& given, bool zeros, bool keep) {
    Matrix w;
    w.format = format;
    w.n = 64;
    w.k = kK;
    w.group = traits_of(format).scales == Scales::none ? 0 : 32;
    std::vector<uint8_t> planes[3]{std::vector<uint8_t>(64 * w.quant_stride() / kRows + 64),
                                   std::vector<uint8_t>(64 / kRows * w.scale_count() * 2),
                                   std::vector<uint8_t>(zeros ? 64 / kRows * w.scale_count() : 0)};
    w.quants = planes[0].data();
    w.scales = reinterpret_cast<const uint16_t*>(planes[1].data());
    w.zeros = zeros ? planes[2].data() : nullptr;
    Pool pool(2);
    Context context{pool, kernels_generic()};
    for (auto [first, count] : std::initializer_list<std::pair<int, int>>{{0, 16}, {16, 24}, {40, 5}}) {
        Given part = given;  // AWQ's words hold eight rows
        part.values.at += first * given.values.row / (kind == Kind::awq ? 8 : 1);
        part.scales.at += first * given.scales.row;
        part.zeros.at += first * given.zeros.row;
        if (part.blocks.at) part.blocks.at += first * part.blocks.row;
        if (pack_rows(context, w, {0, first + 8, 1}, count, kK, part, keep)) fail("flags", first, 1, 0);
    }
    return hash(planes[2], hash(planes[1], hash(planes[0], 0xcbf29ce484222325u)));
}

}  // namespace

int main() {
    set_grids();
    const std::vector<float> scales = random_floats(kN * kK / kGroup);
    std::vector<uint8_t> zeros(scales.size());
    for (uint8_t& zero : zeros) zero = static_cast<uint8_t>(below(16));
    for (Kind kind : {Kind::f32, Kind::bf16, Kind::f16, Kind::f8, Kind::u8, Kind::i8, Kind::u4, Kind::awq}) {
        const std::vector<uint8_t> bytes = rows_of(kind);
        const int64_t bits[] = {32, 16, 16, 8, 8, 8, 4, 4};
        Given given;
        given.values = {bytes.data(), kind, kK * bits[static_cast<int>(kind)] / 8, 4};
        if (kind == Kind::awq) given.values = {bytes.data(), kind, 4, kN / 8 * 4 + 4};
        if (kind >= Kind::f8) {
            given.scales = {reinterpret_cast<const uint8_t*>(scales.data()), Kind::f32, kK / kGroup * 4, 4};
            given.zeros = {zeros.data(), Kind::u8, kK / kGroup, 1};
            given.group = kGroup;
        }
        for (Format format : {format_named("float32"), format_named("bfloat16"), format_named("float16"),
                              format_named("q8"), format_named("q4")})
            for (bool with : {false, true})
                if (format == format_named("q4") || !with)
                    std::printf("%d %d %d %016llx\n", static_cast<int>(kind), static_cast<int>(format), with,
                                static_cast<unsigned long long>(packed(format, kind, given, with, false)));
        const Format own = kind == Kind::f8  ? format_named("f8")
                           : kind < Kind::u4 ? format_named("q8")
                                             : format_named("q4");
        if (kind >= Kind::f8)
            std::printf("%d kept %016llx\n", static_cast<int>(kind),
                        static_cast<unsigned long long>(packed(own, kind, given, own == format_named("q4"), true)));
    }
    struct Type {
        Ggml type;
        int bytes;  // of 256 columns
        Format own;
    };
    for (auto [type, bytes, own] : std::initializer_list<Type>{
             {Ggml::q4_0, 144, format_named("q4")},        {Ggml::q4_1, 160, format_named("q4_k")},
             {Ggml::q5_0, 176, format_named("q5_k")},      {Ggml::q5_1, 192, format_named("q5_k")},
             {Ggml::q8_0, 272, format_named("q8")},        {Ggml::q4_k, 144, format_named("q4_k")},
             {Ggml::q5_k, 176, format_named("q5_k")},      {Ggml::q6_k, 210, format_named("q6_k")},
             {Ggml::iq4_nl, 144, format_named("iq4")},     {Ggml::iq4_xs, 136, format_named("iq4")},
             {Ggml::mxfp4, 136, format_named("mxfp4")},    {Ggml::q2_k, 84, format_named("q2_k")},
             {Ggml::q3_k, 110, format_named("q3_k")},      {Ggml::iq2_xxs, 66, format_named("iq2_xxs")},
             {Ggml::iq2_xs, 74, format_named("iq2_xs")},   {Ggml::iq2_s, 82, format_named("iq2_s")},
             {Ggml::iq3_xxs, 98, format_named("iq3_xxs")}, {Ggml::iq3_s, 110, format_named("iq3_s")},
             {Ggml::iq1_s, 50, format_named("iq1_s")},     {Ggml::iq1_m, 56, format_named("iq1_m")},
             {Ggml::tq1_0, 54, format_named("tq2_0")},     {Ggml::tq2_0, 66, format_named("tq2_0")},
             {Ggml::nvfp4, 144, format_named("nvfp4")}}) {
        std::vector<uint8_t> rows(kN * bytes);
        for (uint8_t& byte : rows) byte = static_cast<uint8_t>(below(256)) & 0xbf;  // no scale is infinite
        Given given;
        given.blocks = {rows.data(), type, bytes, 0};
        for (Format format : {format_named("float32"), format_named("q8"), own})
            std::printf("blocks %d %d %016llx\n", static_cast<int>(type), static_cast<int>(format),
                        static_cast<unsigned long long>(packed(format, Kind::f32, given, false, format == own)));
    }
}
