// The ops of kernels/streams.h, kernels/selected.h and kernels/ngrams.h, which say what each address points to; 0 stands
// for null.

#include "bindings/streams.h"

#include "bindings/engine.h"
#include "kernels/ngrams.h"
#include "kernels/selected.h"
#include "kernels/streams.h"

namespace py = pybind11;

namespace umbra {

void bind_streams(py::module_& m) {
    m.attr("most_streams") = kMostStreams;
    m.def(
        "spread",
        [](uintptr_t x, uintptr_t out, int64_t tokens, int64_t hidden, int64_t streams) {
            submit(Spread{at<const float>(x), at<float>(out), tokens, hidden, streams});
        },
        py::arg("x"), py::arg("out"), py::arg("tokens"), py::arg("hidden"), py::arg("streams"));
    m.def(
        "stream_norm",
        [](uintptr_t x, uintptr_t weight, uintptr_t out, int64_t tokens, int64_t hidden, int64_t streams, float eps) {
            submit(
                StreamNorm{at<const float>(x), at<const float>(weight), at<float>(out), tokens, hidden, streams, eps});
        },
        py::arg("x"), py::arg("weight"), py::arg("out"), py::arg("tokens"), py::arg("hidden"), py::arg("streams"),
        py::arg("eps"));
    m.def(
        "scaled_silu",
        [](uintptr_t x, uintptr_t out, int64_t tokens, int64_t width, int64_t stride, float factor) {
            submit(ScaledSilu{at<const float>(x), at<float>(out), tokens, width, stride, factor});
        },
        py::arg("x"), py::arg("out"), py::arg("tokens"), py::arg("width"), py::arg("stride"), py::arg("factor"));
    m.def(
        "gated_read",
        [](uintptr_t gates, uintptr_t normed, uintptr_t out, int64_t tokens, int64_t hidden, int64_t streams) {
            submit(GatedRead{at<const float>(gates), at<const float>(normed), at<float>(out), tokens, hidden, streams});
        },
        py::arg("gates"), py::arg("normed"), py::arg("out"), py::arg("tokens"), py::arg("hidden"), py::arg("streams"));
    m.def(
        "gated_write",
        [](uintptr_t x, uintptr_t y, uintptr_t logits, int64_t tokens, int64_t hidden, int64_t streams,
           int64_t stride) {
            submit(
                GatedWrite{at<float>(x), at<const float>(y), at<const float>(logits), tokens, hidden, streams, stride});
        },
        py::arg("x"), py::arg("y"), py::arg("logits"), py::arg("tokens"), py::arg("hidden"), py::arg("streams"),
        py::arg("stride"));
    m.def(
        "sinkhorn_read",
        [](uintptr_t x, uintptr_t fn, uintptr_t scale, uintptr_t base, uintptr_t out, uintptr_t post, uintptr_t comb,
           int64_t tokens, int64_t hidden, int64_t streams, int64_t steps, float eps, float margin) {
            submit(SinkhornRead{at<const float>(x), at<const float>(fn), at<const float>(scale), at<const float>(base),
                                at<float>(out), at<float>(post), at<float>(comb), tokens, hidden, streams, steps, eps,
                                margin});
        },
        py::arg("x"), py::arg("fn"), py::arg("scale"), py::arg("base"), py::arg("out"), py::arg("post"),
        py::arg("comb"), py::arg("tokens"), py::arg("hidden"), py::arg("streams"), py::arg("steps"), py::arg("eps"),
        py::arg("margin"));
    m.def(
        "sinkhorn_write",
        [](uintptr_t x, uintptr_t y, uintptr_t post, uintptr_t comb, int64_t tokens, int64_t hidden, int64_t streams) {
            submit(SinkhornWrite{at<float>(x), at<const float>(y), at<const float>(post), at<const float>(comb), tokens,
                                 hidden, streams});
        },
        py::arg("x"), py::arg("y"), py::arg("post"), py::arg("comb"), py::arg("tokens"), py::arg("hidden"),
        py::arg("streams"));
    m.attr("most_block") = SelectedAttention::kMostRatio;
    m.attr("most_ngram") = NgramRows::kMostSize;
    m.attr("blocks_together") = ChooseBlocks::kTogether;
    m.def(
        "norm_rotate",
        [](uintptr_t x, uintptr_t weight, uintptr_t cos, uintptr_t sin, uintptr_t out, int64_t tokens, int64_t heads,
           int64_t width, int64_t stride, int64_t angle_stride, float eps) {
            submit(NormRotate{at<const float>(x), at<const float>(weight), at<const float>(cos), at<const float>(sin),
                              at<float>(out), tokens, heads, width, stride, angle_stride, eps});
        },
        py::arg("x"), py::arg("weight"), py::arg("cos"), py::arg("sin"), py::arg("out"), py::arg("tokens"),
        py::arg("heads"), py::arg("width"), py::arg("stride"), py::arg("angle_stride"), py::arg("eps"));
    m.def(
        "write_rows",
        [](uintptr_t k, uintptr_t v, uintptr_t k_cache, uintptr_t v_cache, uintptr_t slots, int64_t tokens,
           int64_t heads, int64_t width, int64_t page_size, int64_t k_stride, int64_t v_stride, int type) {
            submit(WriteRows{at<const float>(k), at<const float>(v), at<void>(k_cache), at<void>(v_cache),
                             at<const int64_t>(slots), tokens, heads, width, page_size, k_stride, v_stride,
                             static_cast<Type>(type)});
        },
        py::arg("k"), py::arg("v"), py::arg("k_cache"), py::arg("v_cache"), py::arg("slots"), py::arg("tokens"),
        py::arg("heads"), py::arg("width"), py::arg("page_size"), py::arg("k_stride"), py::arg("v_stride"),
        py::arg("type"));
    m.def(
        "write_index",
        [](uintptr_t keys, uintptr_t weight, uintptr_t cos, uintptr_t sin, uintptr_t back_cos, uintptr_t back_sin,
           uintptr_t cache, uintptr_t slots, int64_t tokens, int64_t width, int64_t page_size, int64_t ratio,
           int64_t stride, int64_t angle_stride, float eps, int type) {
            submit(WriteIndex{at<const float>(keys), at<const float>(weight), at<const float>(cos),
                              at<const float>(sin), at<const float>(back_cos), at<const float>(back_sin),
                              at<void>(cache), at<const int64_t>(slots), tokens, width, page_size, ratio, stride,
                              angle_stride, eps, static_cast<Type>(type)});
        },
        py::arg("keys"), py::arg("weight"), py::arg("cos"), py::arg("sin"), py::arg("back_cos"), py::arg("back_sin"),
        py::arg("cache"), py::arg("slots"), py::arg("tokens"), py::arg("width"), py::arg("page_size"), py::arg("ratio"),
        py::arg("stride"), py::arg("angle_stride"), py::arg("eps"), py::arg("type"));
    m.def(
        "choose_blocks",
        [](uintptr_t q, uintptr_t weights, uintptr_t cache, uintptr_t block_tables, uintptr_t query_starts,
           uintptr_t kv_lens, uintptr_t out, uintptr_t scores, uintptr_t order, int64_t tokens, int64_t sequences,
           int64_t heads, int64_t width, int64_t page_size, int64_t ratio, int64_t top, int64_t most_pages, int type) {
            submit(ChooseBlocks{at<const float>(q), at<const float>(weights), at<const void>(cache),
                                at<const int64_t>(block_tables), at<const int64_t>(query_starts),
                                at<const int64_t>(kv_lens), at<int32_t>(out), at<float>(scores), at<int32_t>(order),
                                tokens, sequences, heads, width, page_size, ratio, top, most_pages,
                                static_cast<Type>(type)});
        },
        py::arg("q"), py::arg("weights"), py::arg("cache"), py::arg("block_tables"), py::arg("query_starts"),
        py::arg("kv_lens"), py::arg("out"), py::arg("scores"), py::arg("order"), py::arg("tokens"),
        py::arg("sequences"), py::arg("heads"), py::arg("width"), py::arg("page_size"), py::arg("ratio"),
        py::arg("top"), py::arg("most_pages"), py::arg("type"));
    m.def(
        "selected_attention",
        [](uintptr_t q, uintptr_t k_cache, uintptr_t v_cache, uintptr_t block_tables, uintptr_t query_starts,
           uintptr_t kv_lens, uintptr_t blocks, uintptr_t out, int64_t tokens, int64_t sequences, int64_t heads,
           int64_t kv_heads, int64_t width, int64_t page_size, int64_t ratio, int64_t top, int64_t most_pages,
           float scale, int type) {
            submit(SelectedAttention{at<const float>(q), at<const void>(k_cache), at<const void>(v_cache),
                                     at<const int64_t>(block_tables), at<const int64_t>(query_starts),
                                     at<const int64_t>(kv_lens), at<const int32_t>(blocks), at<float>(out), tokens,
                                     sequences, heads, kv_heads, width, page_size, ratio, top, most_pages, scale,
                                     static_cast<Type>(type)});
        },
        py::arg("q"), py::arg("k_cache"), py::arg("v_cache"), py::arg("block_tables"), py::arg("query_starts"),
        py::arg("kv_lens"), py::arg("blocks"), py::arg("out"), py::arg("tokens"), py::arg("sequences"),
        py::arg("heads"), py::arg("kv_heads"), py::arg("width"), py::arg("page_size"), py::arg("ratio"), py::arg("top"),
        py::arg("most_pages"), py::arg("scale"), py::arg("type"));
    m.def(
        "ngram_rows",
        [](uintptr_t ids, uintptr_t before, uintptr_t multipliers, uintptr_t moduli, uintptr_t offsets, uintptr_t parts,
           uintptr_t out, int64_t tokens, int64_t size, int64_t heads, int64_t width, int64_t part_rows, int64_t end,
           int type) {
            submit(NgramRows{at<const int64_t>(ids), at<const int64_t>(before), at<const int64_t>(multipliers),
                             at<const int64_t>(moduli), at<const int64_t>(offsets), at<const int64_t>(parts),
                             at<float>(out), tokens, size, heads, width, part_rows, end, static_cast<Type>(type)});
        },
        py::arg("ids"), py::arg("before"), py::arg("multipliers"), py::arg("moduli"), py::arg("offsets"),
        py::arg("parts"), py::arg("out"), py::arg("tokens"), py::arg("size"), py::arg("heads"), py::arg("width"),
        py::arg("part_rows"), py::arg("end"), py::arg("type"));
    m.def(
        "agreeing_values",
        [](uintptr_t keys, uintptr_t queries, uintptr_t values, uintptr_t out, int64_t tokens, int64_t hidden,
           int64_t streams) {
            submit(AgreeingValues{at<const float>(keys), at<const float>(queries), at<const float>(values),
                                  at<float>(out), tokens, hidden, streams});
        },
        py::arg("keys"), py::arg("queries"), py::arg("values"), py::arg("out"), py::arg("tokens"), py::arg("hidden"),
        py::arg("streams"));
}

}  // namespace umbra
