// The NPU kernels of torch.ops.umbra.* (schemas.py has what they compute, umbra_calls.h their arguments). Each checks its
// arguments, allocates the output and makes one aclnn call.
//
// EXEC_NPU_CMD_EXT finds the call in libcust_opapi.so below ASCEND_CUSTOM_OPP_PATH and puts it into torch_npu's task
// queue, as torch_npu's own ops do (their EXEC_NPU_CMD needs symbols that the wheel does not export). So the call is
// captured into graphs, and TASK_QUEUE_ENABLE=2 moves its tiling to the queue's thread. EXEC_NPU_CMD_EXT ignores errors
// of GetWorkspaceSize, so everything that the tiling would refuse is refused here.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "../op_host/umbra_planes.h"
#include "op_plugin/include/npu_cpp_extension.h"
#include "torch_npu/csrc/aten/common/from_blob.h"
#include "torch_npu/csrc/core/npu/NPUFormat.h"

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

using umbra::kStep;

#include "umbra_calls.h"

void check_rows(const Tensor& x) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, "x: ", x.scalar_type(),
                     ": must be float16 or bfloat16");
    TORCH_CHECK(x.dim() == 2 && x.size(0) >= 1, "x: ", x.sizes(), ": must be (tokens, K) with a token or more");
    TORCH_CHECK(x.size(0) <= umbra::kMostTokens, "x: ", x.sizes(), ": must be ", umbra::kMostTokens, " tokens at most");
    TORCH_CHECK(x.size(1) % kStep == 0, "x: ", x.sizes(), ": K must be a multiple of ", kStep);
    TORCH_CHECK(x.size(1) <= umbra::kMostRows, "x: ", x.sizes(), ": K must be ", umbra::kMostRows, " at most");
}

void check_inner(int64_t inner) {
    TORCH_CHECK(inner >= kStep && inner % kStep == 0 && inner <= umbra::kMostInner, "inner: ", inner,
                ": must be a multiple of ", kStep, ", ", umbra::kMostInner, " at most");
}

umbra::Planes layout(const char* name, int64_t group, int64_t rows, bool ordered) {
    TORCH_CHECK((group == 32 || group == 64 || group == 128) && rows % group == 0, name, ": ", group,
                ": must be 32, 64 or 128, and divide ", rows);
    return umbra::planes_of(rows, group, ordered);
}

// Weights must be contiguous: copying them in each step would take longer than the product.
void check_kept(const char* name, const Tensor& kept, at::ScalarType type) {
    TORCH_CHECK_TYPE(kept.scalar_type() == type, name, ": ", kept.scalar_type(), ": must be ", type);
    TORCH_CHECK(kept.is_contiguous(), name, ": ", kept.sizes(), " of strides ", kept.strides(), ": must be contiguous");
}

struct Names {
    const char *w, *scales, *zeros;
};

// Checks w ([E,] planes, N, bytes), scales and zeros ([E,] sections, N, groups), and returns N.
int64_t check_weight(const Names& names, const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, int64_t rank,
                     at::ScalarType type, const umbra::Planes& planes) {
    check_kept(names.w, w, at::kByte);
    check_kept(names.scales, scales, type);
    const bool alike = w.dim() == rank && w.size(-3) == planes.sections * planes.planes;
    TORCH_CHECK(alike && w.size(-1) == planes.lanes / 2, names.w, ": ", w.sizes(), ": must have ", rank,
                " dimensions, ending in (", planes.sections * planes.planes, ", N, ", planes.lanes / 2, ") for K of ",
                planes.k);
    const int64_t n = w.size(-2);
    TORCH_CHECK(n >= umbra::kColumns && n % umbra::kColumns == 0, names.w, ": ", w.sizes(),
                ": N must be a multiple of ", umbra::kColumns);
    TORCH_CHECK(rank == 3 || w.size(0) <= umbra::kMostExperts, names.w, ": ", w.sizes(), ": must be ",
                umbra::kMostExperts, " experts at most");
    const bool same = scales.dim() == rank && scales.size(-3) == planes.sections && scales.size(-2) == n;
    TORCH_CHECK(same && scales.size(-1) == planes.kept() && (rank == 3 || scales.size(0) == w.size(0)), names.scales,
                ": ", scales.sizes(), ": must be as ", names.w, " ", w.sizes(), ", ending in (", planes.sections, ", ",
                n, ", ", planes.kept(), ")");
    if (zeros) {
        check_kept(names.zeros, *zeros, type);
        TORCH_CHECK(zeros->sizes() == scales.sizes(), names.zeros, ": ", zeros->sizes(), ": must be as ", names.scales,
                    " ", scales.sizes());
    }
    return n;
}

void check_routing(const Tensor& x, const Tensor& ids, const Tensor& weights) {
    TORCH_CHECK_TYPE(ids.scalar_type() == at::kInt, "ids: ", ids.scalar_type(), ": must be int32");
    TORCH_CHECK(ids.dim() == 2 && ids.size(0) == x.size(0) && ids.size(1) >= 1, "ids: ", ids.sizes(), ": must be (",
                x.size(0), ", k) with k of 1 or more");
    TORCH_CHECK(ids.numel() <= umbra::kMostPairs, "ids: ", ids.sizes(), ": must be ", umbra::kMostPairs, " at most");
    TORCH_CHECK_TYPE(weights.scalar_type() == x.scalar_type(), "weights: ", weights.scalar_type(), ": must be ",
                     x.scalar_type());
    TORCH_CHECK(weights.sizes() == ids.sizes(), "weights: ", weights.sizes(), ": must be as ids ", ids.sizes());
}

// Checks the matrices of a mixture.
template <class Call> void check_mixture(const Call& of) {
    const at::ScalarType type = of.x.scalar_type();
    check_rows(of.x);
    const umbra::Planes first = layout("group", of.group, of.x.size(1), false);
    const int64_t columns = check_weight({"w13", "s13", "z13"}, of.w13, of.s13, of.z13, 4, type, first);
    check_inner(columns / 2);
    const umbra::Planes second = layout("group2", of.group2, columns / 2, true);
    const int64_t n = check_weight({"w2", "s2", "z2"}, of.w2, of.s2, of.z2, 4, type, second);
    TORCH_CHECK(n == of.x.size(1) && of.w2.size(0) == of.w13.size(0), "w2: ", of.w2.sizes(),
                ": must be as many experts as w13 ", of.w13.sizes(), ", and ", of.x.size(1), " columns");
    TORCH_CHECK(of.z13.has_value() == of.z2.has_value(), "z2: ", of.z2 ? "given" : "absent",
                ": must be given where z13 is");
}

// Computes a call whose result has `sizes` and is like `like`.
template <class Call> Tensor launched(const Call& of, at::IntArrayRef sizes, const Tensor& like) {
    const at::OptionalDeviceGuard guard(at::device_of(like));
    Tensor y = at::empty(sizes, like.options());
    of.launch(y);
    return y;
}

Tensor compute(const fused_moe_w4a16& of) {
    check_mixture(of);
    check_routing(of.x, of.ids, of.weights);
    return launched(of, of.x.sizes(), of.x);
}

Tensor compute(const fused_moe_scores_w4a16& of) {
    check_mixture(of);
    const Tensor &x = of.x, &scores = of.scores;
    const int64_t here = of.w13.size(0);
    TORCH_CHECK_TYPE(scores.scalar_type() == at::kFloat || scores.scalar_type() == x.scalar_type(),
                     "scores: ", scores.scalar_type(), ": must be float32 or ", x.scalar_type());
    TORCH_CHECK(scores.dim() == 2 && scores.size(0) == x.size(0) && scores.size(1) <= umbra::kMostScored,
                "scores: ", scores.sizes(), ": must be (", x.size(0), ", experts) with ", umbra::kMostScored,
                " experts at most");
    const int64_t scored = scores.size(1);
    TORCH_CHECK(of.top_k >= 1 && of.top_k <= umbra::kMostChosen && of.top_k <= scored, "top_k: ", of.top_k,
                ": must be 1 to ", umbra::kMostChosen, ", and at most the ", scored, " experts of the scores");
    TORCH_CHECK(of.first_expert >= 0 && of.first_expert + here <= scored, "first_expert: ", of.first_expert,
                ": this and the ", here - 1, " experts after it must be among the ", scored, " of the scores");
    TORCH_CHECK(of.sigmoid || !of.bias, "bias: must be absent where scores do not become sigmoids");
    if (of.bias) {
        check_kept("bias", *of.bias, at::kFloat);
        TORCH_CHECK(of.bias->dim() == 1 && of.bias->size(0) == scored, "bias: ", of.bias->sizes(), ": must be (",
                    scored, ")");
    }
    return launched(of, x.sizes(), x);
}

Tensor compute(const fused_moe_slots_w4a16& of) {
    check_rows(of.x);
    check_kept("arena", of.arena, at::kByte);
    check_kept("places", of.places, at::kInt);
    TORCH_CHECK(of.arena.dim() == 1, "arena: ", of.arena.sizes(), ": must have one dimension");
    TORCH_CHECK(of.places.dim() == 1 && of.places.size(0) >= 1 && of.places.size(0) <= umbra::kMostExperts,
                "places: ", of.places.sizes(), ": must have one dimension, of 1 to ", umbra::kMostExperts, " experts");
    check_inner(of.inner);
    layout("group", of.group, of.x.size(1), false);
    layout("group2", of.group2, of.inner, true);
    check_routing(of.x, of.ids, of.weights);
    return launched(of, of.x.sizes(), of.x);
}

Tensor compute(const gemv_w4a16& of) {
    check_rows(of.x);
    const umbra::Planes planes = layout("group", of.group, of.x.size(1), false);
    const int64_t n = check_weight({"w", "scales", "zeros"}, of.w, of.scales, of.zeros, 3, of.x.scalar_type(), planes);
    return launched(of, {of.x.size(0), n}, of.x);
}

// Checks what both ops that unpack need, and returns the shape (E, N, K) of the values.
template <class Call> std::vector<int64_t> unpacked_sizes(const Call& of) {
    const Tensor &w = of.w, &scales = of.scales;
    TORCH_CHECK(w.dim() == 4, "w: ", w.sizes(), ": must have 4 dimensions");
    TORCH_CHECK_TYPE(scales.scalar_type() == at::kHalf || scales.scalar_type() == at::kBFloat16,
                     "scales: ", scales.scalar_type(), ": must be float16 or bfloat16");
    const umbra::Planes planes = layout("group", of.group, w.size(1) * w.size(3) * 2, of.ordered);
    const int64_t n = check_weight({"w", "scales", "zeros"}, w, scales, of.zeros, 4, scales.scalar_type(), planes);
    TORCH_CHECK(!of.pairs || n % (2 * umbra::kPairs) == 0, "w: ", w.sizes(),
                ": columns of gate and up must be a multiple of ", 2 * umbra::kPairs);
    return {w.size(0), n, planes.k};
}

Tensor compute(const unpack_w4a16& of) { return launched(of, unpacked_sizes(of), of.scales); }

// The operator's y is ND, so it gets the memory of `bank` as a tensor in ND.
void compute(const unpack_tiles_w4a16& of) {
    const std::vector<int64_t> sizes = unpacked_sizes(of);
    const Tensor& bank = of.bank;
    check_kept("bank", bank, of.scales.scalar_type());
    TORCH_CHECK(bank.sizes() == at::IntArrayRef(sizes) && sizes[1] % umbra::kPairs == 0, "bank: ", bank.sizes(),
                ": must be ", at::IntArrayRef(sizes), ", N a multiple of ", umbra::kPairs);
    const int64_t format = at_npu::native::get_npu_format(bank);
    TORCH_CHECK(format == ACL_FORMAT_FRACTAL_NZ && bank.storage_offset() == 0, "bank: format ", format,
                ": must be FRACTAL_NZ, and the whole of its storage");
    Tensor y = at_npu::native::from_blob(bank.data_ptr(), sizes, of.scales.options());
    const at::OptionalDeviceGuard guard(at::device_of(of.w));
    of.launch(y);
}

}  // namespace

TORCH_LIBRARY_IMPL(umbra, PrivateUse1, ops) { register_ops(ops); }
