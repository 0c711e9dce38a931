// The ops of kernels/ops.h, which says what each address points to; 0 stands for null.

#include <stdexcept>
#include <string_view>

#include "bindings/engine.h"
#include "kernels/slots.h"

namespace py = pybind11;

namespace umbra {

void bind_ops(py::module_& m) {
    m.attr("most_width") = kMostWidth;
    m.attr("most_latent") = kMostLatent;
    m.attr("most_rotary") = kMostRotary;
    m.attr("most_groups") = Route::kMostGroups;
    m.attr("most_taps") = CausalConv::kMostTaps;
    m.def("argmax_chunks", &Argmax::chunks, py::arg("width"));
    m.def(
        "sample_scratch", [](int64_t width) { return engine.most_threads() * Sample::scratch_floats(width); },
        py::arg("width"));
    m.def("linear_scratch", &Scratch::bytes, py::arg("rows"), py::arg("k"));
    m.def("head_linear_scratch", &HeadLinear::scratch_bytes, py::arg("rows"), py::arg("k"));
    m.def("moe_scratch", &Moe::scratch_bytes, py::arg("tokens"), py::arg("k"), py::arg("experts"), py::arg("hidden"),
          py::arg("inner"));

    m.def(
        "embedding",
        [](uintptr_t ids, uintptr_t table, uintptr_t out, int64_t tokens, int64_t vocabulary, int64_t hidden,
           int64_t first_id, int type) {
            submit(Embedding{at<const int64_t>(ids), at<const void>(table), at<float>(out), tokens, vocabulary, hidden,
                             first_id, static_cast<Type>(type)});
        },
        py::arg("ids"), py::arg("table"), py::arg("out"), py::arg("tokens"), py::arg("vocabulary"), py::arg("hidden"),
        py::arg("first_id"), py::arg("type"));
    m.def(
        "embedding_of",
        [](const SplitMatrix& table, uintptr_t ids, uintptr_t out, int64_t tokens, int64_t vocabulary, int64_t hidden,
           int64_t first_id) {
            submit(EmbeddingOf{fitting(table), at<const int64_t>(ids), at<float>(out), tokens, vocabulary, hidden,
                               first_id});
        },
        py::arg("table"), py::arg("ids"), py::arg("out"), py::arg("tokens"), py::arg("vocabulary"), py::arg("hidden"),
        py::arg("first_id"));
    m.def(
        "rms_norm",
        [](uintptr_t x, uintptr_t residual, uintptr_t weight, uintptr_t bias, uintptr_t out, uintptr_t total,
           int64_t tokens, int64_t heads, int64_t width, int64_t stride, float eps) {
            submit(RmsNorm{at<const float>(x), at<const float>(residual), at<const float>(weight), at<float>(out),
                           at<float>(total), tokens, heads, width, stride, eps, at<const float>(bias)});
        },
        py::arg("x"), py::arg("residual"), py::arg("weight"), py::arg("bias"), py::arg("out"), py::arg("total"),
        py::arg("tokens"), py::arg("heads"), py::arg("width"), py::arg("stride"), py::arg("eps"));
    m.def(
        "square_sums",
        [](uintptr_t x, uintptr_t squares, int64_t tokens, int64_t width, int64_t stride) {
            submit(SquareSums{at<const float>(x), at<float>(squares), tokens, width, stride});
        },
        py::arg("x"), py::arg("squares"), py::arg("tokens"), py::arg("width"), py::arg("stride"));
    m.def(
        "scale_by_squares",
        [](uintptr_t x, uintptr_t squares, uintptr_t weight, uintptr_t out, int64_t tokens, int64_t width,
           int64_t stride, int64_t count, float eps) {
            submit(ScaleBySquares{at<const float>(x), at<const float>(squares), at<const float>(weight), at<float>(out),
                                  tokens, width, stride, count, eps});
        },
        py::arg("x"), py::arg("squares"), py::arg("weight"), py::arg("out"), py::arg("tokens"), py::arg("width"),
        py::arg("stride"), py::arg("count"), py::arg("eps"));
    m.def(
        "rope",
        [](uintptr_t x, uintptr_t cos, uintptr_t sin, uintptr_t out, int64_t tokens, int64_t heads, int64_t width,
           int64_t stride) {
            submit(Rope{at<const float>(x), at<const float>(cos), at<const float>(sin), at<float>(out), tokens, heads,
                        width, stride});
        },
        py::arg("x"), py::arg("cos"), py::arg("sin"), py::arg("out"), py::arg("tokens"), py::arg("heads"),
        py::arg("width"), py::arg("stride"));
    m.def(
        "write_kv",
        [](uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache, uintptr_t slots, int64_t tokens,
           int64_t heads, int64_t width, int64_t page_size, int64_t k_stride, int64_t v_stride, int type) {
            submit(WriteKv{at<const float>(k), at<const float>(v), at<void>(k_cache), at<void>(v_cache),
                           at<const int64_t>(slots), tokens, heads, width, page_size, k_stride, v_stride,
                           static_cast<Type>(type)});
        },
        py::arg("k"), py::arg("v"), py::arg("k_cache"), py::arg("v_cache"), py::arg("slots"), py::arg("tokens"),
        py::arg("heads"), py::arg("width"), py::arg("page_size"), py::arg("k_stride"), py::arg("v_stride"),
        py::arg("type"));
    m.def(
        "attention",
        [](uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables, uintptr_t query_starts,
           uintptr_t kv_lens, uintptr_t out, int64_t sequences, int64_t heads, int64_t kv_heads, int64_t width,
           int64_t page_size, int64_t most_pages, int64_t tokens, float scale, int type, int64_t window,
           uintptr_t sinks) {
            submit(Attention{at<const float>(q), at<const void>(k_cache), at<const void>(v_cache),
                             at<const int64_t>(block_tables), at<const int64_t>(query_starts),
                             at<const int64_t>(kv_lens), at<float>(out), sequences, heads, kv_heads, width, page_size,
                             most_pages, tokens, scale, static_cast<Type>(type), window, at<const float>(sinks)});
        },
        py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_tables"), py::arg("query_starts"),
        py::arg("kv_lens"), py::arg("out"), py::arg("sequences"), py::arg("heads"), py::arg("kv_heads"),
        py::arg("width"), py::arg("page_size"), py::arg("most_pages"), py::arg("tokens"), py::arg("scale"),
        py::arg("type"), py::arg("window"), py::arg("sinks"));
    m.def(
        "write_latents",
        [](uintptr_t latents, uintptr_t keys, uintptr_t cache, uintptr_t slots, int64_t tokens, int64_t width,
           int64_t rotary, int64_t page_size, int64_t latent_stride, int64_t key_stride, int type) {
            submit(WriteLatents{at<const float>(latents), at<const float>(keys), at<void>(cache),
                                at<const int64_t>(slots), tokens, width, rotary, page_size, latent_stride, key_stride,
                                static_cast<Type>(type)});
        },
        py::arg("latents"), py::arg("keys"), py::arg("cache"), py::arg("slots"), py::arg("tokens"), py::arg("width"),
        py::arg("rotary"), py::arg("page_size"), py::arg("latent_stride"), py::arg("key_stride"), py::arg("type"));
    m.def(
        "latent_attention",
        [](uintptr_t q, uintptr_t q_rotary, uintptr_t cache, uintptr_t block_tables, uintptr_t query_starts,
           uintptr_t kv_lens, uintptr_t out, int64_t sequences, int64_t heads, int64_t width, int64_t rotary,
           int64_t page_size, int64_t most_pages, int64_t tokens, float scale, int type) {
            Attention op{at<const float>(q),
                         at<const void>(cache),
                         at<const void>(cache),
                         at<const int64_t>(block_tables),
                         at<const int64_t>(query_starts),
                         at<const int64_t>(kv_lens),
                         at<float>(out),
                         sequences,
                         heads,
                         Attention::latent_parts(heads),
                         width,
                         page_size,
                         most_pages,
                         tokens,
                         scale,
                         static_cast<Type>(type)};
            op.rotary = rotary, op.q_rotary = at<const float>(q_rotary);
            submit(op);
        },
        py::arg("q"), py::arg("q_rotary"), py::arg("cache"), py::arg("block_tables"), py::arg("query_starts"),
        py::arg("kv_lens"), py::arg("out"), py::arg("sequences"), py::arg("heads"), py::arg("width"), py::arg("rotary"),
        py::arg("page_size"), py::arg("most_pages"), py::arg("tokens"), py::arg("scale"), py::arg("type"));
    py::class_<ExpandedAttention>(m, "ExpandedAttention")
        .def(py::init([](const SplitMatrix& keys, const SplitMatrix& values, uintptr_t q, uintptr_t q_rotary,
                         uintptr_t cache, uintptr_t block_tables, uintptr_t query_starts, uintptr_t kv_lens,
                         uintptr_t out, uintptr_t peaks, int64_t sequences, int64_t heads, int64_t width,
                         int64_t rotary, int64_t key, int64_t value, int64_t page_size, int64_t most_pages,
                         int64_t tokens, int64_t q_stride, float scale, int type) {
                 return new ExpandedAttention{fitting(keys),
                                              fitting(values),
                                              at<const float>(q),
                                              at<const float>(q_rotary),
                                              at<const void>(cache),
                                              at<const int64_t>(block_tables),
                                              at<const int64_t>(query_starts),
                                              at<const int64_t>(kv_lens),
                                              at<float>(out),
                                              at<float>(peaks),
                                              nullptr,
                                              sequences,
                                              heads,
                                              width,
                                              rotary,
                                              key,
                                              value,
                                              page_size,
                                              most_pages,
                                              tokens,
                                              q_stride,
                                              scale,
                                              static_cast<Type>(type)};
             }),
             py::arg("keys"), py::arg("values"), py::arg("q"), py::arg("q_rotary"), py::arg("cache"),
             py::arg("block_tables"), py::arg("query_starts"), py::arg("kv_lens"), py::arg("out"), py::arg("peaks"),
             py::arg("sequences"), py::arg("heads"), py::arg("width"), py::arg("rotary"), py::arg("key"),
             py::arg("value"), py::arg("page_size"), py::arg("most_pages"), py::arg("tokens"), py::arg("q_stride"),
             py::arg("scale"), py::arg("type"))
        .def_property_readonly("memory_bytes",
                               [](const ExpandedAttention& op) { return op.memory_bytes(*engine.kernels); });
    m.def(
        "expanded_attention",
        [](ExpandedAttention op, uintptr_t memory) {
            op.memory = at<uint8_t>(memory);
            submit(op);
        },
        py::arg("op"), py::arg("memory"));
    m.def(
        "head_linear",
        [](const SplitMatrix& w, uintptr_t x, uintptr_t out, uintptr_t scratch, int64_t tokens, int64_t heads,
           int64_t n, int64_t stride) {
            submit(HeadLinear{fitting(w), at<const float>(x), at<float>(out), at<uint8_t>(scratch), tokens, heads, n,
                              stride});
        },
        py::arg("w"), py::arg("x"), py::arg("out"), py::arg("scratch"), py::arg("tokens"), py::arg("heads"),
        py::arg("n"), py::arg("stride"));
    m.def(
        "silu_mul",
        [](uintptr_t x, uintptr_t out, int64_t tokens, int64_t width) {
            submit(SiluMul{at<const float>(x), at<float>(out), tokens, width});
        },
        py::arg("x"), py::arg("out"), py::arg("tokens"), py::arg("width"));
    m.def(
        "gelu_mul",
        [](uintptr_t gate, uintptr_t up, uintptr_t out, int64_t tokens, int64_t width, int64_t gate_stride,
           int64_t up_stride) {
            submit(GeluMul{at<const float>(gate), at<const float>(up), at<float>(out), tokens, width, gate_stride,
                           up_stride});
        },
        py::arg("gate"), py::arg("up"), py::arg("out"), py::arg("tokens"), py::arg("width"), py::arg("gate_stride"),
        py::arg("up_stride"));
    m.def(
        "softcap", [](uintptr_t x, int64_t count, float cap) { submit(Softcap{at<float>(x), count, cap}); },
        py::arg("x"), py::arg("count"), py::arg("cap"));
    m.def(
        "scale_by",
        [](uintptr_t x, uintptr_t factor, int64_t count) {
            submit(ScaleBy{at<float>(x), at<const float>(factor), count});
        },
        py::arg("x"), py::arg("factor"), py::arg("count"));
    m.def(
        "add_gated",
        [](uintptr_t x, uintptr_t y, uintptr_t gate, int64_t tokens, int64_t width) {
            submit(AddGated{at<float>(x), at<const float>(y), at<const float>(gate), tokens, width});
        },
        py::arg("x"), py::arg("y"), py::arg("gate"), py::arg("tokens"), py::arg("width"));
    m.def(
        "gated_rms_norm",
        [](uintptr_t x, uintptr_t gate, uintptr_t weight, uintptr_t out, int64_t tokens, int64_t heads, int64_t width,
           int64_t stride, float eps, bool sigmoid) {
            submit(GatedRmsNorm{at<const float>(x), at<const float>(gate), at<const float>(weight), at<float>(out),
                                tokens, heads, width, stride, eps, sigmoid});
        },
        py::arg("x"), py::arg("gate"), py::arg("weight"), py::arg("out"), py::arg("tokens"), py::arg("heads"),
        py::arg("width"), py::arg("stride"), py::arg("eps"), py::arg("sigmoid"));
    m.def(
        "sigmoid_mul",
        [](uintptr_t x, uintptr_t gate, int64_t tokens, int64_t width, int64_t stride) {
            submit(SigmoidMul{at<float>(x), at<const float>(gate), tokens, width, stride});
        },
        py::arg("x"), py::arg("gate"), py::arg("tokens"), py::arg("width"), py::arg("stride"));
    py::class_<Places>(m, "Places")
        .def(py::init([](uintptr_t starts, uintptr_t reads, uintptr_t writes, uintptr_t marks, uintptr_t marked,
                         uintptr_t pending, int64_t sequences) {
                 return new Places{at<const int64_t>(starts),
                                   at<const int32_t>(reads),
                                   at<const int32_t>(writes),
                                   at<const int32_t>(marks),
                                   at<const int32_t>(marked),
                                   at<const int32_t>(pending),
                                   sequences};
             }),
             py::arg("starts"), py::arg("reads"), py::arg("writes"), py::arg("marks"), py::arg("marked"),
             py::arg("pending"), py::arg("sequences"));
    m.def(
        "causal_conv",
        [](const Places& places, uintptr_t x, uintptr_t weight, uintptr_t states, uintptr_t out, int64_t tokens,
           int64_t channels, int64_t taps, int64_t ahead, int64_t stride, int64_t place) {
            submit(CausalConv{at<const float>(x), at<const float>(weight), at<float>(states), places, at<float>(out),
                              tokens, channels, taps, ahead, stride, place});
        },
        py::arg("places"), py::arg("x"), py::arg("weight"), py::arg("states"), py::arg("out"), py::arg("tokens"),
        py::arg("channels"), py::arg("taps"), py::arg("ahead"), py::arg("stride"), py::arg("place"));
    m.def(
        "gated_delta_rule",
        [](const Places& places, uintptr_t qkv, uintptr_t a, uintptr_t b, uintptr_t rates, uintptr_t dt_bias,
           uintptr_t states, uintptr_t inputs, uintptr_t factors, uintptr_t out, int64_t tokens, int64_t key_heads,
           int64_t heads, int64_t depth, int64_t width, int64_t ahead, int64_t a_stride, int64_t b_stride,
           int64_t place, int64_t decays, float lowest) {
            submit(GatedDelta{at<float>(qkv),
                              at<const float>(a),
                              at<const float>(b),
                              at<const float>(rates),
                              at<const float>(dt_bias),
                              at<float>(states),
                              at<float>(inputs),
                              places,
                              at<float>(factors),
                              at<float>(out),
                              tokens,
                              key_heads,
                              heads,
                              depth,
                              width,
                              ahead,
                              a_stride,
                              b_stride,
                              place,
                              decays,
                              lowest});
        },
        py::arg("places"), py::arg("qkv"), py::arg("a"), py::arg("b"), py::arg("rates"), py::arg("dt_bias"),
        py::arg("states"), py::arg("inputs"), py::arg("factors"), py::arg("out"), py::arg("tokens"),
        py::arg("key_heads"), py::arg("heads"), py::arg("depth"), py::arg("width"), py::arg("ahead"),
        py::arg("a_stride"), py::arg("b_stride"), py::arg("place"), py::arg("decays"), py::arg("lowest"));
    m.def(
        "route",
        [](uintptr_t logits, uintptr_t bias, uintptr_t weights, uintptr_t ids, uintptr_t scratch, int64_t tokens,
           int64_t experts, int64_t k, bool sigmoid, bool renormalise, float scale, int64_t groups, int64_t kept_groups,
           int64_t best, uintptr_t factors) {
            submit(Route{at<const float>(logits), at<const float>(bias), at<float>(weights), at<int64_t>(ids),
                         at<float>(scratch), tokens, experts, k, sigmoid, renormalise, scale, groups, kept_groups, best,
                         at<const float>(factors)});
        },
        py::arg("logits"), py::arg("bias"), py::arg("weights"), py::arg("ids"), py::arg("scratch"), py::arg("tokens"),
        py::arg("experts"), py::arg("k"), py::arg("sigmoid"), py::arg("renormalise"), py::arg("scale") = 1.0f,
        py::arg("groups") = 1, py::arg("kept_groups") = 1, py::arg("best") = 1, py::arg("factors") = 0);
    m.def(
        "argmax",
        [](uintptr_t x, uintptr_t out, uintptr_t best, int64_t rows, int64_t width) {
            submit(Argmax{at<const float>(x), at<int64_t>(out), at<int32_t>(best), rows, width});
        },
        py::arg("x"), py::arg("out"), py::arg("best"), py::arg("rows"), py::arg("width"));
    m.def(
        "sample",
        [](uintptr_t logits, const py::bytes& choices, uintptr_t out, uintptr_t scratch, int64_t rows, int64_t width) {
            const std::string_view packed = choices;
            if (packed.size() != rows * sizeof(Choice)) throw std::invalid_argument("not one choice for each row");
            submit(Sample{at<const float>(logits), reinterpret_cast<const Choice*>(packed.data()), at<int64_t>(out),
                          at<float>(scratch), rows, width});
        },
        py::arg("logits"), py::arg("choices"), py::arg("out"), py::arg("scratch"), py::arg("rows"), py::arg("width"));
    m.def(
        "linear",
        [](const SplitMatrix& w, uintptr_t x, uintptr_t bias, uintptr_t out, uintptr_t scratch, int64_t tokens,
           int64_t n, int64_t stride) {
            submit(Linear{fitting(w), at<const float>(x), at<const float>(bias), at<float>(out),
                          Scratch{at<uint8_t>(scratch)}, tokens, n, stride});
        },
        py::arg("w"), py::arg("x"), py::arg("bias"), py::arg("out"), py::arg("scratch"), py::arg("tokens"),
        py::arg("n"), py::arg("stride"));
    m.def(
        "moe",
        [](const SplitMatrix& w13, const SplitMatrix& w2, uintptr_t x, uintptr_t weights, uintptr_t ids, uintptr_t out,
           uintptr_t scratch, int64_t tokens, int64_t k, int64_t experts, int64_t first_expert, int64_t hidden,
           int64_t inner, float limit, float alpha, bool gelu, uintptr_t address) {
            submit(Moe{fitting(w13),
                       fitting(w2),
                       at<const float>(x),
                       at<const float>(weights),
                       at<const int64_t>(ids),
                       at<float>(out),
                       at<uint8_t>(scratch),
                       tokens,
                       k,
                       experts,
                       first_expert,
                       hidden,
                       inner,
                       {limit, alpha, gelu},
                       at<const int64_t>(address)});
        },
        py::arg("w13"), py::arg("w2"), py::arg("x"), py::arg("weights"), py::arg("ids"), py::arg("out"),
        py::arg("scratch"), py::arg("tokens"), py::arg("k"), py::arg("experts"), py::arg("first_expert"),
        py::arg("hidden"), py::arg("inner"), py::arg("limit"), py::arg("alpha"), py::arg("gelu"), py::arg("address"));
    py::class_<SlotMatrix>(m, "SlotMatrix")
        .def(py::init([](int format, int type, int of_bias, int64_t n, int64_t k, int32_t group, int32_t groups,
                         int32_t lanes, int32_t unit, uintptr_t data, uintptr_t scales, uintptr_t offsets,
                         uintptr_t bias) {
                 return SlotMatrix{static_cast<Format>(format),
                                   static_cast<Type>(type),
                                   static_cast<Type>(of_bias),
                                   group,
                                   n,
                                   k,
                                   groups,
                                   lanes,
                                   unit,
                                   at<const uint8_t>(data),
                                   at<const uint8_t>(scales),
                                   at<const uint8_t>(offsets),
                                   at<const uint8_t>(bias)};
             }),
             py::arg("format"), py::arg("type"), py::arg("of_bias"), py::arg("n"), py::arg("k"), py::arg("group"),
             py::arg("groups"), py::arg("lanes"), py::arg("unit"), py::arg("data"), py::arg("scales"),
             py::arg("offsets"), py::arg("bias"),
             "The planes' places in an expert's block; 0 for those that it lacks.");
    py::class_<SlotExperts, std::shared_ptr<SlotExperts>>(m, "SlotExperts")
        .def(py::init([](const SlotMatrix& w13, const SlotMatrix& w2, std::vector<int32_t> order) {
                 return SlotExperts{w13, w2, std::move(order)};
             }),
             py::arg("w13"), py::arg("w2"), py::arg("order"));
    py::class_<MoeRows>(m, "MoeRows")
        .def(py::init([](const SplitMatrix& w13, const SplitMatrix& w2, uintptr_t address, uintptr_t elsewhere,
                         uintptr_t x, uintptr_t ids, uintptr_t rows, uintptr_t scratch, int64_t tokens, int64_t k,
                         int64_t experts, int64_t first_expert, int64_t hidden, int64_t inner, float limit, float alpha,
                         bool gelu) {
                 return MoeRows{w13,
                                w2,
                                at<const int64_t>(address),
                                at<const int64_t>(elsewhere),
                                at<const float>(x),
                                at<const int64_t>(ids),
                                at<float>(rows),
                                at<uint8_t>(scratch),
                                tokens,
                                k,
                                experts,
                                first_expert,
                                hidden,
                                inner,
                                {limit, alpha, gelu},
                                nullptr};
             }),
             py::arg("w13"), py::arg("w2"), py::arg("address"), py::arg("elsewhere"), py::arg("x"), py::arg("ids"),
             py::arg("rows"), py::arg("scratch"), py::arg("tokens"), py::arg("k"), py::arg("experts"),
             py::arg("first_expert"), py::arg("hidden"), py::arg("inner"), py::arg("limit"), py::arg("alpha"),
             py::arg("gelu"))
        .def(
            "in_slots",
            [](MoeRows rows, std::shared_ptr<const SlotExperts> slots) {
                rows.slots = std::move(slots);
                return rows;
            },
            py::arg("slots"), "The same of experts that lie as a device's slots hold them.");
    m.def(
        "moe_rows",
        [](const MoeRows& rows) {
            if (!rows.slots) fitting(rows.w13), fitting(rows.w2);
            submit(rows);
        },
        py::arg("rows"));
}

}  // namespace umbra
