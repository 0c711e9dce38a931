// What CANN's own sources demand of the arguments of the kernels that Umbra calls. A call that breaks a rule is refused
// as aclnn would refuse it. Sources are files of ops-transformer (OT) and ops-nn (ON) with a branch and a line.
#include <algorithm>
#include <cstdio>
#include <list>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "fake.h"

namespace {

using fake::Object;
using Arguments = std::vector<const Object*>;

constexpr int kAny = 0;

// Tensors and lists of tensors in the order of the call; what is absent leaves no trace.
struct Call {
    std::vector<const Object*> tensors, lists;
    const Object* group = nullptr;  // the communicator, if it is named

    explicit Call(const Arguments& arguments) {
        for (const Object* object : arguments) {
            if (object->tensor()) tensors.push_back(object);
            if (!object->text.compare(0, 6, "group=")) group = object;
            if (!object->members.empty()) lists.push_back(object);
        }
    }
    // A tensor of the call, or the first one of a list. The last ones are -1, -2, ...
    const Object& at(int i) const { return *tensors.at(i < 0 ? tensors.size() + i : i); }
    const Object& first(size_t list) const { return *lists.at(list)->members.at(0); }
    // The first tensor of this type and rank.
    const Object* find(int type, size_t rank) const {
        for (const Object* tensor : tensors)
            if (tensor->type == type && tensor->shape.size() == rank) return tensor;
        return nullptr;
    }
};

// The size of dimension i of a tensor; the last ones are -1, -2, ...
int64_t size(const Object& tensor, int i) {
    const int rank = static_cast<int>(tensor.shape.size());
    const int at = i < 0 ? rank + i : i;
    return at >= 0 && at < rank ? tensor.shape[at] : -1;
}

bool packed(const Object& weight) { return weight.type == ACL_INT32; }  // eight 4-bit values in a word
int64_t columns(const Object& weight) { return size(weight, -1) * (packed(weight) ? 8 : 1); }
bool int8(const Object& tensor) { return tensor.type == ACL_INT8; }
bool half(const Object& tensor) { return tensor.type == ACL_BF16 || tensor.type == ACL_FLOAT16; }

bool one_type(const Call& call, const std::vector<int>& tensors) {
    for (int i : tensors)
        if (call.at(i).type != call.at(0).type) return false;
    return true;
}

// Whether some tensor of the call, or some list's only one, is of this type and shape.
bool has(const Call& call, int type, const std::vector<int64_t>& shape) {
    const auto fits = [&](const Object* tensor) { return tensor->type == type && tensor->shape == shape; };
    return std::any_of(call.tensors.begin(), call.tensors.end(), fits) ||
           std::any_of(call.lists.begin(), call.lists.end(),
                       [&](const Object* list) { return fits(list->members[0]); });
}

// Columns of a cache in tiles (blocks, columns / 16, tokens, 16); 0: it is none.
int64_t tiled_columns(const Object& cache) {
    return cache.shape.size() == 4 && size(cache, 3) == 16 ? 16 * size(cache, 1) : 0;
}

// The widths of keys that are split: of their own columns in the cache, and of those that rotate, which a tensor of its
// own has as the queries have theirs. {0, 0}: queries and keys are whole.
struct Split {
    const Object *queries = nullptr, *keys = nullptr;  // the rotated columns
};

// Attention: query; lists of keys and of values; mask; tables; rotated columns of queries and of keys; result, sums.
Split split(const Call& call) {
    std::vector<const Object*> rotated;
    const Object& query = call.at(0);
    for (size_t i = 1; i < call.tensors.size(); ++i) {
        const Object* tensor = call.tensors[i];
        if (tensor->type == query.type && tensor->shape.size() >= 3 && size(*tensor, -1) == 64)
            rotated.push_back(tensor);
    }
    if (rotated.size() < 2 || size(query, -1) == 64) return {};
    return {rotated[0], rotated[1]};
}

// Lists of a grouped product: rows, weights, biases if there are any, results. By 4-bit weights scales follow the biases,
// and offsets if there are any.
bool biased(const Call& call) {
    return call.lists.size() > 3 && !int8(call.first(1)) && call.first(2).shape.size() == 2 &&
           size(call.first(2), 0) == size(call.first(1), 0);
}
bool has_offsets(const Call& call) { return call.lists.size() >= 5u + biased(call); }

// An exchange of rows between experts on several ranks: x (rows, columns), `chosen` experts for each row.
struct Exchange {
    int64_t rows, columns, chosen, ranks, experts;

    // Bytes of the window; each rank keeps rows for every expert, and results, twice.
    size_t window() const {
        auto whole = [](size_t size, size_t unit) { return (size + unit - 1) / unit * unit; };
        const size_t row = 2 * columns;
        return 2 * rows * (experts * whole(whole(row, 32) + 44, 512) + chosen * whole(row, 512));
    }
};

// Dispatch: x, ids; rows for the experts here, scales, places, counts, received, ...
Exchange dispatched(const Call& call) {
    const int64_t here = size(call.at(5), 0), received = size(call.at(6), 0);
    return {size(call.at(0), 0), size(call.at(0), 1), size(call.at(1), 1), received / here, received};
}

// Combine: rows, ids, places, received, weights; sums.
Exchange combined(const Call& call) {
    return {size(call.at(1), 0), size(call.at(0), 1), size(call.at(1), 1), 0, size(call.at(3), 0)};
}

bool within(int64_t value, int64_t least, int64_t most) { return least <= value && value <= most; }

bool exchangeable(const Exchange& exchange) {
    return within(exchange.rows, 1, 512) && within(exchange.columns, 1024, 8192) &&
           within(exchange.chosen, 1, std::min<int64_t>(16, exchange.experts)) && within(exchange.experts, 1, 1024);
}

struct Rule {
    const char* kernel;  // a name or, with a star at its end, the beginning of names
    int before;          // the first version of CANN without the rule, 805 for 8.5; kAny: all have it
    bool (*holds)(const Call& call);
    const char* demand;
    const char* source;
};

const Rule kRules[] = {
    {"aclnnGroupedMatmul*", 900, [](const Call& call) { return !packed(call.first(1)) || has_offsets(call); },
     "antiquantOffset must not be null for 4-bit weights",
     "OT 8.5.0 gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp 836; 9.0.0 867 allows it"},
    {"aclnnGroupedMatmul*", kAny,
     [](const Call& call) {
         const Object* groups = call.find(ACL_INT64, 1);
         return groups && size(*groups, 0) == size(call.first(1), 0) && size(*groups, 0) <= 1024;
     },
     "group_list is (experts) int64, of 1,024 at most",
     "OT 9.1.0 gmm/grouped_matmul/op_api/aclnn_grouped_matmul.cpp 529"},
    {"aclnnGroupedMatmul*", kAny, [](const Call& call) { return size(call.first(0), -1) == size(call.first(1), -2); },
     "x has as many columns as a weight has rows", "OT 9.1.0 gmm/grouped_matmul/op_api/aclnn_grouped_matmul.cpp 2037"},
    {"aclnnGroupedMatmulWeightNz", kAny,
     [](const Call& call) {
         const Object& weight = call.first(1);
         return !half(weight) || (size(weight, -1) % 16 == 0 && size(weight, -2) % 16 == 0);
     },
     "rows and columns of tiled weights are multiples of 16",
     "OT 9.1.0 gmm/grouped_matmul/op_api/aclnn_grouped_matmul.cpp 2307"},
    {"aclnnGroupedMatmul*", kAny,
     [](const Call& call) {
         const Object& weight = call.first(1);
         return !packed(weight) || size(weight, -2) % size(call.first(2 + biased(call)), -2) == 0;
     },
     "the rows of 4-bit weights are whole groups", "OT 9.1.0 gmm/grouped_matmul/op_api/aclnn_grouped_matmul.cpp 976"},
    {"aclnnGroupedMatmul*", kAny,
     [](const Call& call) { return columns(call.first(1)) <= 65535 && size(call.first(0), -1) <= 65535; },
     "inner axes have 65,535 elements at most", "OT 9.1.0 gmm/grouped_matmul/op_api/aclnn_grouped_matmul.cpp 276"},
    {"aclnnGroupedMatmul*", kAny,
     [](const Call& call) {
         if (!biased(call)) return true;
         const int rows = call.first(0).type;
         return call.first(2).type == (rows == ACL_BF16 ? ACL_FLOAT : rows) &&
                size(call.first(2), 1) == columns(call.first(1));
     },
     "biases are (experts, columns), float32 beside bfloat16 and else of the type of the rows",
     "OT 8.5.0 gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp 709, 1111, 1459; 9.0.0 739, 1340, 1691; "
     "9.1.0 "
     "op_api 828, 1581, 2142"},
    {"aclnnGroupedMatmul*", kAny,
     [](const Call& call) {
         const Object &rows = call.first(0), &weight = call.first(1), &result = call.first(call.lists.size() - 1);
         if (!int8(weight) || result.type == ACL_INT32) return true;
         const int type = result.type == ACL_BF16 ? ACL_BF16 : ACL_FLOAT;
         return int8(rows) && half(result) && call.lists.size() > 3 && call.first(2).type == type &&
                call.first(2).shape == std::vector<int64_t>{size(weight, 0), size(weight, 2)} &&
                has(call, ACL_FLOAT, {size(rows, 0)});
     },
     "int8 has scales (experts, columns), bfloat16 with a bfloat16 result and float32 with float16, and (rows) float32",
     "OT 8.5.0 gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp 635, 748; 9.0.0 665, 776; 9.1.0 op_api 743, "
     "867"},
    {"aclnnGroupedMatmulWeightNz", kAny,
     [](const Call& call) {
         const Object& weight = call.first(1);
         return !int8(weight) || (size(weight, -1) % 32 == 0 && size(weight, -2) % 16 == 0);
     },
     "tiled weights of int8 have multiples of 16 rows and of 32 columns",
     "OT 8.5.0 gmm/grouped_matmul/op_host/op_api/aclnn_grouped_matmul.cpp 1612; 9.0.0 1851; 9.1.0 op_api 2303"},
    {"aclnnGroupedMatmulSwigluQuantWeightNzV2", kAny,
     [](const Call& call) {
         const Object &rows = call.at(0), &weight = call.first(0), &scales = call.first(1);
         const int64_t experts = size(weight, 0), inputs = size(weight, 1), outputs = size(weight, 2);
         const bool typed = int8(rows) && int8(weight) && (scales.type == ACL_FLOAT || half(scales));
         return typed && size(rows, 1) == inputs && scales.shape == std::vector<int64_t>{experts, outputs} &&
                has(call, ACL_FLOAT, {size(rows, 0)}) && has(call, ACL_INT64, {experts}) && int8(call.at(-2));
     },
     "rows and weights are int8, scales (experts, columns) and (rows), counts (experts) int64",
     "OT 8.5.0 gmm/grouped_matmul_swiglu_quant_v2/op_host/op_api/aclnn_gmm_dsq_base.h 225, 528; 9.0.0 gmm_dsq_base.h "
     "237, "
     "628; 9.1.0 op_api 260, 691"},
    {"aclnnGroupedMatmulSwigluQuantWeightNzV2", kAny,
     [](const Call& call) {
         const Object& weight = call.first(0);
         const int64_t inputs = size(weight, 1), outputs = size(weight, 2);
         return inputs % 16 == 0 && outputs % 32 == 0 && inputs < 65536 && outputs <= 10240;
     },
     "weights have a multiple of 16 rows below 65,536, and of 32 columns up to 10,240",
     "OT 8.5.0 gmm/grouped_matmul_swiglu_quant_v2/op_host/op_api/aclnn_gmm_dsq_base.h 169, 270; 9.0.0 gmm_dsq_base.h "
     "181, "
     "282; 9.1.0 op_api 194, 313"},
    {"aclnnGroupedMatmulSwigluQuantV2", kAny, [](const Call& call) { return !int8(call.first(0)); },
     "weights of int8 are in tiles",
     "OT 8.5.0 gmm/grouped_matmul_swiglu_quant_v2/op_host/op_api/aclnn_gmm_dsq_base.h 557; 9.0.0 gmm_dsq_base.h 659; "
     "9.1.0 op_api 722"},
    {"aclnnDequantSwigluQuant*", kAny,
     [](const Call& call) {
         const Object &sums = call.at(0), &scales = call.at(1);
         return sums.type == ACL_INT32 && sums.shape.size() == 2 && scales.type == ACL_FLOAT &&
                has(call, ACL_FLOAT, {size(sums, 0)}) && has(call, ACL_INT64, {size(scales, 0)}) &&
                scales.shape == std::vector<int64_t>{size(scales, 0), size(sums, 1)};
     },
     "sums are int32, scales (experts, columns) and (rows) float32, counts (experts) int64",
     "ON 8.5.0 quant/dequant_swiglu_quant/op_host/dequant_swiglu_quant_tiling.cpp 127, 178, 196, 399; 9.0.0 128, 179, "
     "197, "
     "400; 9.1.0 130, 183, 201, 413"},
    {"aclnnDequantSwigluQuant*", kAny,
     [](const Call& call) { return size(call.at(0), 1) % 64 == 0 && size(call.at(0), 1) <= 7232; },
     "sums have a multiple of 64 columns, 7,232 at most",
     "ON 8.5.0 quant/dequant_swiglu_quant/op_host/dequant_swiglu_quant_tiling.cpp 489; 9.0.0 490; 9.1.0 512, 628, "
     "document "
     "of aclnnDequantSwigluQuantV2"},
    {"aclnnDynamicQuant*", kAny,
     [](const Call& call) {
         const Object& rows = call.at(0);
         return half(rows) && int8(call.at(-2)) && call.at(-2).shape == rows.shape && call.at(-1).type == ACL_FLOAT &&
                size(rows, 0) > 0;
     },
     "rows have 16 bits and become int8 with scales in float32",
     "ON 8.5.0 quant/dynamic_quant/op_host/op_api/aclnn_dynamic_quant.cpp 288; 9.0.0 319; 9.1.0 316"},
    {"aclnnAddRmsNormDynamicQuantV2", kAny,
     [](const Call& call) {
         const Object &rows = call.at(0), &scales = call.at(-2);
         const bool typed = std::all_of(call.tensors.begin(), call.tensors.end() - 5,
                                        [&](const Object* tensor) { return tensor->type == rows.type; });
         return half(rows) && typed && one_type(call, {-3}) && call.at(1).shape == rows.shape && size(rows, 0) > 0 &&
                call.at(2).shape == std::vector<int64_t>{size(rows, -1)} && int8(call.at(-5)) &&
                call.at(-5).shape == rows.shape && scales.type == ACL_FLOAT && size(scales, 0) == size(rows, 0);
     },
     "rows, residuals and weights of a norm have 16 bits, results are int8 with scales (rows) in float32",
     "ON 8.5.0 norm/add_rms_norm_dynamic_quant/op_host/op_api/aclnn_add_rms_norm_dynamic_quant_v2.cpp 49, 64, 208; "
     "9.0.0 84, 99, 291; 9.1.0 116, 131, 354; add_rms_norm_dynamic_quant_tiling.cpp 8.5.0 457, 463; 9.0.0 530, 535; "
     "9.1.0 543, 549"},
    {"aclnnQuantMatmulWeightNz", kAny,
     [](const Call& call) {
         const Object &rows = call.at(0), &weight = call.at(1), &result = call.at(-1);
         return int8(rows) && int8(weight) && size(rows, 1) == size(weight, 0) && half(result) && size(rows, 0) > 0 &&
                has(call, ACL_FLOAT, {size(rows, 0)}) && has(call, ACL_FLOAT, {size(weight, 1)});
     },
     "rows and weights are int8, scales (rows) and (columns) float32",
     "ON 8.5.0 matmul/quant_batch_matmul_v3/op_api/aclnn_quant_matmul_v4.cpp 170, 602; 9.0.0 276, 749; 9.1.0 164, 636"},
    {"aclnnQuantMatmulWeightNz", kAny,
     [](const Call& call) {
         const Object& result = call.at(-1);
         return std::all_of(call.tensors.begin() + 4, call.tensors.end(), [&](const Object* tensor) {
             return size(*tensor, 0) == 0 || tensor->type == result.type || tensor->type == ACL_FLOAT;
         });
     },
     "a bias has the type of the result or is float32",
     "ON 8.5.0 matmul/quant_batch_matmul_v3/op_api/quant_matmul_checker.cpp 81; 9.0.0 82; 9.1.0 85"},
    {"aclnnClippedSwiglu", kAny,
     [](const Call& call) { return one_type(call, {-1}) && 2 * size(call.at(-1), -1) == size(call.at(0), -1); },
     "the result has the type of the input, and half of its columns",
     "ops-nn master activation/clipped_swiglu/docs/aclnnClippedSwiglu.md"},
    {"aclnnMoeInitRoutingV2", kAny,
     [](const Call& call) { return call.at(1).type == ACL_INT32 && call.at(4).type == ACL_INT32; },
     "expert ids and counts are int32",
     "OT 9.1.0 moe/moe_init_routing_v2/op_host/op_api/aclnn_moe_init_routing_v2.cpp 75"},
    {"aclnnMoeInitRoutingV3", kAny,
     [](const Call& call) { return call.at(1).type == ACL_INT32 && call.at(-2).type == ACL_INT64; },
     "expert ids are int32, counts int64",
     "OT 9.1.0 moe/moe_init_routing_v3/op_host/op_api/aclnn_moe_init_routing_v3.cpp 36, 42"},
    {"aclnnMoeComputeExpertTokens", kAny,
     [](const Call& call) { return size(call.at(0), 0) <= 1 << 24 && size(call.at(1), 0) <= 2048; },
     "2^24 rows and 2,048 experts at most", "OT 9.1.0 moe/moe_compute_expert_tokens"},
    {"aclnnMoeFinalizeRouting*", kAny, [](const Call& call) { return call.at(1).type == ACL_INT32; },
     "expanded_src_to_dst_row is int32",
     "OT 9.1.0 moe/moe_finalize_routing_v2/op_host/op_api/aclnn_moe_finalize_routing_v2.cpp 31"},
    {"aclnnMoeGatingTopKSoftmax", kAny,
     [](const Call& call) { return size(call.at(1), -1) <= 1024 && call.at(2).type == ACL_INT32; },
     "k is 1,024 at most, ids are int32",
     "OT 9.1.0 moe/moe_gating_top_k_softmax/op_host/moe_gating_top_k_softmax_tiling_base.cpp 28"},
    {"aclnnApplyRotaryPosEmb*", kAny,
     [](const Call& call) {
         const Object &q = call.at(0), &k = call.at(1);
         const int64_t width = size(q, -1);
         return (width == 64 || width == 128) && width == size(k, -1) && size(q, -2) + size(k, -2) <= 255;
     },
     "heads have 64 or 128 values, and are 255 at most with those of keys",
     "OT 9.1.0 posembedding/apply_rotary_pos_emb/op_host/apply_rotary_pos_emb_tiling.cpp 280"},
    {"aclnnRotaryPositionEmbedding*", kAny,
     [](const Call& call) {
         const Object& rows = call.at(0);
         return one_type(call, {1, 2, -1}) && size(rows, -1) <= 896 && size(rows, -1) % 2 == 0 &&
                size(rows, 0) < 1000 && size(rows, -2) < 1000;
     },
     "heads have an even number of values up to 896 and the type of the angles; fewer than 1,000 batches and heads",
     "OT 8.5.0 posembedding/rotary_position_embedding/op_host/rope_rotate_half_tiling.cpp 411, 503; 9.0.0 412, 525; "
     "9.1.0 423, 552; document of aclnnRotaryPositionEmbedding"},
    {"aclnnRmsNorm", kAny,
     [](const Call& call) {
         const int weight = call.at(1).type;
         return weight == call.at(0).type || (weight == ACL_FLOAT && half(call.at(0)));
     },
     "the weight of a norm has the type of the rows, or is float32 beside 16 bits",
     "ON 8.5.0, 9.0.0, 9.1.0 norm/rms_norm/op_host/rms_norm_def.cpp 24, 30"},
    {"aclnnAddRmsNorm", kAny, [](const Call& call) { return one_type(call, {1, 2}); },
     "rows, residuals and the weight of a norm have one type",
     "ON 8.5.0, 9.0.0, 9.1.0 norm/add_rms_norm/op_host/add_rms_norm_def.cpp 36"},
    {"aclnnScatterNdUpdate", kAny,
     [](const Call& call) {
         const Object &written = call.at(0), &index = call.at(1), &rows = call.at(2);
         std::vector<int64_t> shape(index.shape.begin(), index.shape.end() - 1);
         shape.insert(shape.end(), written.shape.begin() + size(index, -1), written.shape.end());
         return (index.type == ACL_INT32 || index.type == ACL_INT64) && rows.type == written.type &&
                rows.shape == shape;
     },
     "indices are integers, and what is written has the type and the rows of the tensor",
     "ON 8.5.0 index/scatter_nd_update/op_host/op_api/aclnn_scatter_nd_update.cpp 42, 64; 9.0.0 op_api 46, 71; 9.1.0 "
     "47, 73"},
    {"aclnnQkvRmsNormRopeCache", 900, [](const Call&) { return false; }, "it is not in CANN before 9.0",
     "OT 9.0.0 posembedding/qkv_rms_norm_rope_cache; 8.5.0 has none"},
    {"aclnnQkvRmsNormRopeCache", kAny,
     [](const Call& call) {
         return size(call.at(1), 0) == 128 && half(call.at(0)) && one_type(call, {0, 1, 2, 3, 4, 6});
     },
     "heads have 128 values, and all inputs one type of 16 bits",
     "OT 9.0.0 posembedding/qkv_rms_norm_rope_cache/op_kernel/qkv_rms_norm_rope_cache_comm.h 89; .._tiling.cpp 36, 57"},
    {"aclnnQkvRmsNormRopeCache", kAny,
     [](const Call& call) {
         const Object &index = call.at(5), &cache = call.at(7);
         const int64_t tokens = size(call.at(0), 0), page = size(cache, 2);
         return index.type == ACL_INT64 && index.shape.size() == 1 && size(index, 0) == tokens && page % 32 == 0 &&
                size(cache, 0) >= (tokens + page - 1) / page;
     },
     "index is (tokens) int64, blocks have a multiple of 32 tokens, and as many tokens in all as the call",
     "OT 9.0.0 posembedding/qkv_rms_norm_rope_cache/op_host/qkv_rms_norm_rope_cache_tiling.cpp 109, 158"},
    {"aclnnQkvRmsNormRopeCache", kAny,
     [](const Call& call) {
         const int64_t kv = tiled_columns(call.at(7)), queries = size(call.at(6), 1);
         return tiled_columns(call.at(8)) == kv && kv > 0 && queries % kv == 0 &&
                size(call.at(0), 1) == queries + 2 * kv;
     },
     "caches are (blocks, columns / 16, tokens, 16), queries a multiple of them",
     "OT 9.0.0 posembedding/qkv_rms_norm_rope_cache/op_host/qkv_rms_norm_rope_cache_tiling.cpp 159, 188"},
    {"aclnnScatterPaKvCache*", kAny,
     [](const Call& call) {
         const Object &key = call.at(0), &cache = call.at(1), &slots = call.at(2);
         return key.shape.size() == 3 && tiled_columns(cache) == size(key, 1) * size(key, 2) &&
                cache.type == key.type && (slots.type == ACL_INT32 || slots.type == ACL_INT64) &&
                size(slots, 0) == size(key, 0);
     },
     "keys are (tokens, heads, values), caches (blocks, columns / 16, tokens, 16), slots (tokens)",
     "OT 8.5.0 attention/scatter_pa_kv_cache/docs/aclnnScatterPaKvCache.md, the first case"},
    {"aclnnFusedInferAttentionScore*", kAny,
     [](const Call& call) {
         const Object& key = call.first(0);
         const int64_t width = 16 * size(key, 2);
         return key.shape.size() != 5 || (size(key, 4) == 16 && (width == 64 || width == 128));
     },
     "heads of tiled caches have 64 or 128 values",
     "OT 9.0.0 attention/fused_infer_attention_score/op_host/arch32/.._tiling_check_feature.cpp 735"},
    {"aclnnFusedInferAttentionScore*", kAny,
     [](const Call& call) {
         const Object* tables = call.find(ACL_INT32, 2);
         const Object& key = call.first(0);
         if (!tables && call.at(0).shape.size() == 3) {  // packed
             return key.shape == call.first(1).shape && (size(key, -1) == 128 || !split(call).keys);
         }
         return tables && size(key, key.shape.size() == 5 ? 3 : 1) == 128;
     },
     "block tables are int32, blocks have 128 tokens, the only number that both versions' documents have",
     "OT 8.5.0 and 9.1.0, documents of aclnnFusedInferAttentionScoreV3; code: .._tiling_check_feature.cpp 70"},
    {"aclnnFusedInferAttentionScore*", kAny,
     [](const Call& call) { return call.at(0).shape.size() != 3 || size(call.at(0), 2) <= 256 || split(call).keys; },
     "heads of packed tokens have 256 values at most",
     "OT 8.5.0 attention/fused_infer_attention_score/op_host/fused_infer_attention_score_tiling.cpp 1063; 9.0.0 1167; "
     "9.1.0 1205"},
    {"aclnnFusedInferAttentionScore*", kAny,
     [](const Call& call) {
         const Object *sinks = call.find(ACL_BF16, 1), *other = call.find(ACL_FLOAT16, 1), &query = call.at(0);
         if (!sinks) return !other;
         return query.shape.size() == 3 && size(*sinks, 0) == size(query, 1) &&
                (size(query, 2) == 64 || size(query, 2) == 128);
     },
     "sinks are (heads) bfloat16, of packed queries of 64 or 128 values",
     "OT 8.5.0 attention/fused_infer_attention_score/op_host/arch32/.._tiling_check_feature.cpp 410, .._def.cpp 505, "
     ".._tiling_v3.cpp 562; 9.0.0 444, .._tiling_v3.cpp 901; 9.1.0 op_host/arch22 506, 1084"},
    {"aclnnFusedInferAttentionScore*", kAny,
     [](const Call& call) {
         const Split rotated = split(call);
         if (!rotated.keys) return size(call.at(0), -1) != 512;
         const Object &query = call.at(0), &key = call.first(0);
         const int64_t width = size(query, -1), heads = size(query, -2);
         const std::vector<int64_t> rows(query.shape.begin(), query.shape.end() - 1),
             own(key.shape.begin(), key.shape.end() - 1);
         const auto begins = [](const Object& tensor, const std::vector<int64_t>& shape) {
             return std::vector<int64_t>(tensor.shape.begin(), tensor.shape.end() - 1) == shape;
         };
         const bool shaped = begins(*rotated.queries, rows) && begins(*rotated.keys, own) && half(query);
         if (width == 128) return shaped && size(key, -1) == 128;
         return shaped && width == 512 && size(key, -1) == 512 && heads <= 128 && (heads & (heads - 1)) == 0;
     },
     "heads with 64 rotated columns have 128 others, or 512 over one head of keys: 1, 2, 4, .., 128 heads of 16 bits",
     "OT 8.5.0 attention/fused_infer_attention_score/op_host/arch32/.._tiling_check_feature.cpp 30, 66, 82, 114; 9.0.0 "
     "623, 724; 9.1.0 op_host/arch22 685, 787"},
    {"aclnnKvRmsNormRopeCache*", kAny,
     [](const Call& call) {
         const int64_t tokens = size(call.at(0), 0);
         const std::vector<int64_t> angles{tokens, 1, 1, 64};
         return call.at(0).shape == std::vector<int64_t>{tokens, 1, 1, 576} && size(call.at(1), 0) == 512 &&
                call.at(2).shape == angles && call.at(3).shape == angles && tokens > 0;
     },
     "rows are (tokens, 1, 1, 576), the weight (512), angles (tokens, 1, 1, 64)",
     "OT 8.5.0 posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_ds_tiling.cpp, .._base_tiling.cpp; "
     "9.0.0 ds 222, 234, base 337; 9.1.0"},
    {"aclnnKvRmsNormRopeCache*", kAny,
     [](const Call& call) {
         const Object &index = call.at(4), &keys = call.at(5), &latents = call.at(6);
         return index.type == ACL_INT64 && index.shape == std::vector<int64_t>{size(call.at(0), 0)} &&
                one_type(call, {1, 2, 3, 5, 6}) && size(keys, 2) == 1 && size(keys, 3) == 64 && size(latents, 2) == 1 &&
                size(latents, 3) == 512 && size(keys, 1) % 16 == 0 && size(latents, 1) == size(keys, 1);
     },
     "index is (tokens) int64, caches (blocks, a multiple of 16 tokens, 1, 64 or 512) of the type of the rows",
     "OT 9.0.0 posembedding/kv_rms_norm_rope_cache/op_host/kv_rms_norm_rope_cache_base_tiling.cpp 205, 257, "
     ".._def.cpp 67; 8.5.0, 9.1.0 the same files"},
    {"aclnnMlaPrologV3*", kAny,
     [](const Call& call) {
         const Object &x = call.at(0), &of_heads = call.at(3);
         const int64_t hidden = size(x, 1), heads = size(of_heads, 0);
         const std::set<int64_t> taken{1024, 2048, 3072, 4096, 5120, 6144, 7168, 7680, 8192};
         const auto shaped = [&](int i, const std::vector<int64_t>& shape) { return call.at(i).shape == shape; };
         return taken.count(hidden) && shaped(1, {hidden, 1536}) && shaped(2, {1536, heads * 192}) &&
                shaped(3, {heads, 128, 512}) && shaped(4, {hidden, 576}) && shaped(5, {1536}) && shaped(6, {512}) &&
                heads <= 128 && (heads & (heads - 1)) == 0;
     },
     "rows are of 1,024 to 8,192 columns, queries' latents of 1,536, heads 1, 2, 4, .., 128 of 128 columns",
     "OT attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp CheckDims, of a mirror without branches"},
    {"aclnnMlaPrologV3*", kAny,
     [](const Call& call) {
         const int64_t tokens = size(call.at(0), 0), page = size(call.at(9), 1);
         const Object &latents = call.at(9), &keys = call.at(10), &index = call.at(11);
         const std::vector<int64_t> angles{tokens, 64};
         return one_type(call, {1, 2, 3, 4, 5, 6, 7, 8, 9, 10}) && call.at(0).type == ACL_BF16 &&
                call.at(7).shape == angles && call.at(8).shape == angles && index.type == ACL_INT64 &&
                index.shape == std::vector<int64_t>{tokens} && page % 16 == 0 && page <= 1024 &&
                latents.shape == std::vector<int64_t>{size(latents, 0), page, 1, 512} &&
                keys.shape == std::vector<int64_t>{size(latents, 0), page, 1, 64};
     },
     "all before attention over latents is bfloat16, angles (tokens, 64), index (tokens) int64, caches in pages",
     "OT attention/mla_prolog/op_host/mla_prolog_tiling_check.cpp FillRequiredParamShapeWithDims, "
     "FillNonQuantParamInfo, the same mirror"},
    {"aclnnTransposeBatchMatMul", kAny,
     [](const Call& call) {
         const Object &rows = call.at(0), &weight = call.at(1);
         return size(rows, 2) == size(weight, 1) && size(rows, 1) == size(weight, 0) && rows.type == weight.type &&
                size(rows, 2) % 128 == 0 && size(weight, 2) % 128 == 0 && size(rows, 1) * size(rows, 2) < 65536 &&
                size(rows, 0) > 0;
     },
     "rows (tokens, heads, inputs) meet (heads, inputs, outputs): multiples of 128, of all heads fewer than 65,536 "
     "inputs",
     "ON 8.5.0 matmul/transpose_batch_mat_mul/op_api/aclnn_transpose_batch_mat_mul.cpp 149, 160, 270; 9.0.0 146, 157, "
     "271; 9.1.0 187 has no multiples"},
    {"aclnnMoeGatingTopK", kAny,
     [](const Call& call) {
         const Object &scores = call.at(0), &second = call.at(1);
         const bool biased = second.shape.size() == 1;
         return scores.shape.size() == 2 && size(scores, 1) <= 2048 && size(scores, 0) > 0 &&
                (!biased || (second.type == scores.type && size(second, 0) == size(scores, 1)));
     },
     "scores are of 2,048 experts at most, a bias has their type",
     "OT 9.0.0 moe/moe_gating_top_k/op_host/moe_gating_top_k_tiling.cpp 142, 155, 263; 8.5.0 and 9.1.0 the same file"},
    {"aclnnMoeDistributeDispatchV*", kAny, [](const Call& call) { return exchangeable(dispatched(call)); },
     "1 to 512 rows of 1,024 to 8,192 columns are sent to 1 to 16 of at most 1,024 experts",
     "OT 8.5.0 mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp 542, 682, 737, "
     "749; 9.0.0 875, 1038, 1118, 1129; 9.1.0 698, 872, 936, 955"},
    {"aclnnMoeDistributeDispatchV*", kAny, [](const Call& call) { return within(dispatched(call).ranks, 2, 768); },
     "rows are sent to 2 to 768 ranks",
     "OT 8.5.0 mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp 511; 9.0.0 747; "
     "9.1.0 582"},
    {"aclnnMoeDistributeDispatchV*", kAny,
     [](const Call& call) {
         const Object& kept = call.at(2);
         return half(call.at(0)) && call.at(1).type == ACL_INT32 && call.at(5).type == ACL_INT64 &&
                (kept.type == call.at(0).type || (int8(kept) && call.at(3).type == ACL_FLOAT));
     },
     "rows that are sent have 16 bits and keep their type, or become int8; ids are int32, counts int64",
     "OT 8.5.0 mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp 290, 355; 9.0.0 "
     "450, 511; 9.1.0 357"},
    {"aclnnMoeDistributeDispatchV*", kAny,
     [](const Call& call) {
         const Exchange exchange = dispatched(call);
         const int64_t kept = size(call.at(2), 0), each = std::min(size(call.at(5), 0), exchange.chosen);
         return kept >= exchange.rows * exchange.ranks * each && size(call.at(4), 0) >= 128 * kept;
     },
     "there is room for the rows of all ranks, and 128 numbers for each",
     "OT 8.5.0 mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp 799 (its combine "
     "734); 9.0.0 1235, 1267; 9.1.0 1095, 1141"},
    {"aclnnMoeDistributeDispatchV*", kAny,
     [](const Call& call) { return !call.group || dispatched(call).window() <= call.group->bytes; },
     "the communicator's buffer holds all rows and results twice",
     "OT 8.5.0 mc2/moe_distribute_dispatch_v2/op_host/op_tiling/moe_distribute_dispatch_v2_tiling.cpp 976; 9.0.0 "
     "moe_distribute_check_win_size.h 106; 9.1.0 120"},
    {"aclnnMoeDistributeCombineV*", kAny,
     [](const Call& call) { return half(call.at(0)) && call.at(1).type == ACL_INT32 && call.at(4).type == ACL_FLOAT; },
     "results have 16 bits, ids are int32, weights float32",
     "OT 8.5.0 mc2/moe_distribute_combine_v2/op_host/op_tiling/moe_distribute_combine_v2_tiling.cpp 475, 525, 565; "
     "9.0.0 653, 664, 677; 9.1.0 629, 638, 651"},
    {"aclnnMoeDistributeCombineV*", kAny,
     [](const Call& call) {
         return exchangeable(combined(call)) && size(call.at(2), 0) >= 128 * size(call.at(0), 0) &&
                call.at(4).shape == call.at(1).shape;
     },
     "1 to 512 rows of 1,024 to 8,192 columns come back, with 128 numbers for each and a weight for each id",
     "OT 8.5.0 mc2/moe_distribute_combine_v2/op_host/op_tiling/moe_distribute_combine_v2_tiling.cpp 680, 726, 734, "
     "762, "
     "940; 9.0.0 949, 1012, 1020, 1253; 9.1.0 913, 976, 984, 1235"},
    {"aclnnMoeDistributeCombineV*", kAny,
     [](const Call& call) { return !call.group || combined(call).window() <= call.group->bytes; },
     "the communicator's buffer holds all rows and results twice",
     "OT 8.5.0 mc2/moe_distribute_combine_v2/op_host/op_tiling/moe_distribute_combine_v2_tiling.cpp 1147"},
};

bool matches(const std::string& kernel, const std::string& name) {
    if (name.back() != '*') return kernel == name;
    const size_t begun = name.size() - 1;  // of aclnnGroupedMatmul, ..SwigluQuant is no version
    return !kernel.compare(0, begun, name, 0, begun) && kernel.compare(begun, 6, "Swiglu");
}

// 8.5.0 -> 805
int series() {
    int major = 0, minor = 0;
    sscanf(fake::cann_version(), "%d.%d", &major, &minor);
    return 100 * major + minor;
}

}  // namespace

std::string fake::broken_rule(const std::string& kernel, const std::vector<const Object*>& arguments) {
    const Call call(arguments);
    const int cann = series();
    for (const Rule& rule : kRules) {
        if ((rule.before != kAny && cann >= rule.before) || !matches(kernel, rule.kernel)) continue;
        bool holds = false;
        try {
            holds = rule.holds(call);
        } catch (const std::out_of_range&) {  // a tensor that the rule is about is missing
        }
        if (!holds) return std::string(rule.demand) + " (" + rule.source + ")";
    }
    return "";
}

// The same for a node of a GE graph. `numbers` describe its tensors in the order of the kernel's arguments, each as
// whether it is a list's only member, its type, its rank, and its sizes.
extern "C" const char* fake_broken_rule(const char* kernel, const int64_t* numbers, size_t count) {
    static thread_local std::string told;
    std::list<fake::Object> objects;
    std::vector<const fake::Object*> arguments;
    for (size_t i = 0; i < count;) {
        fake::Object& tensor = objects.emplace_back();
        tensor.type = static_cast<int>(numbers[i + 1]);
        tensor.shape.assign(numbers + i + 3, numbers + i + 3 + numbers[i + 2]);
        const fake::Object* argument = &tensor;
        if (numbers[i]) {
            fake::Object& list = objects.emplace_back();
            list.members = {&tensor};
            argument = &list;
        }
        arguments.push_back(argument);
        i += 3 + numbers[i + 2];
    }
    told = fake::broken_rule(kernel, arguments);
    return told.c_str();
}
