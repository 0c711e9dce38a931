// The NPU kernels of torch.ops.umbra.* (schemas.py describes their arguments). Each checks its arguments, allocates the
// output and makes one aclnn call.
//
// EXEC_NPU_CMD_EXT finds the call in libcust_opapi.so below ASCEND_CUSTOM_OPP_PATH and puts it into torch_npu's task
// queue, as torch_npu's own ops do (their EXEC_NPU_CMD needs symbols that the wheel does not export). So the call is
// captured into graphs, and TASK_QUEUE_ENABLE=2 moves its tiling to the queue's thread. EXEC_NPU_CMD_EXT ignores errors
// of GetWorkspaceSize, so everything that the tiling would refuse is refused here.
#include <ATen/DeviceGuard.h>
#include <torch/library.h>

#include "op_plugin/include/npu_cpp_extension.h"

namespace {

using at::Tensor;
using MaybeTensor = std::optional<Tensor>;

constexpr int64_t kMostTokens = 8, kMostPairs = 256, kMostExperts = 8192, kStep = 32, kNibbles = 8;

void check_rows(const Tensor& x) {
    TORCH_CHECK_TYPE(x.scalar_type() == at::kHalf || x.scalar_type() == at::kBFloat16, "x: ", x.scalar_type(),
                     ": must be float16 or bfloat16");
    TORCH_CHECK(x.dim() == 2 && x.size(0) >= 1, "x: ", x.sizes(), ": must be (tokens, K) with a token or more");
    TORCH_CHECK(x.size(0) <= kMostTokens, "x: ", x.sizes(), ": must be ", kMostTokens, " tokens at most");
    TORCH_CHECK(x.size(1) % kStep == 0, "x: ", x.sizes(), ": K must be a multiple of ", kStep);
}

// Weights must be contiguous: copying them in each step would take longer than the product.
void check_kept(const char* name, const Tensor& kept, at::ScalarType type) {
    TORCH_CHECK_TYPE(kept.scalar_type() == type, name, ": ", kept.scalar_type(), ": must be ", type);
    TORCH_CHECK(kept.is_contiguous(), name, ": ", kept.sizes(), " of strides ", kept.strides(), ": must be contiguous");
}

struct Names {
    const char *w, *scales, *zeros;
};

// Checks w ([E,] k, N / 8), scales and zeros ([E,] k / G, N), and returns N.
int64_t check_weight(const Names& names, const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, int64_t rank,
                     at::ScalarType type, int64_t k) {
    check_kept(names.w, w, at::kInt);
    check_kept(names.scales, scales, type);
    TORCH_CHECK(w.dim() == rank && w.size(-2) == k, names.w, ": ", w.sizes(), ": must have ", rank,
                " dimensions, the last but one of ", k);
    TORCH_CHECK(rank == 2 || w.size(0) <= kMostExperts, names.w, ": ", w.sizes(), ": must be ", kMostExperts,
                " experts at most");
    const int64_t n = w.size(-1) * kNibbles;
    TORCH_CHECK(scales.dim() == rank && scales.size(-1) == n && (rank == 2 || scales.size(0) == w.size(0)),
                names.scales, ": ", scales.sizes(), ": must be as ", names.w, " ", w.sizes(), " with columns of ", n);
    const int64_t groups = scales.size(-2), group = groups > 0 && k % groups == 0 ? k / groups : 0;
    TORCH_CHECK(group == 32 || group == 64 || group == 128, names.scales, ": ", scales.sizes(), ": must have ", k,
                " / G rows with G of 32, 64 or 128");
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
    TORCH_CHECK(ids.numel() <= kMostPairs, "ids: ", ids.sizes(), ": must be ", kMostPairs, " at most");
    TORCH_CHECK_TYPE(weights.scalar_type() == x.scalar_type(), "weights: ", weights.scalar_type(), ": must be ",
                     x.scalar_type());
    TORCH_CHECK(weights.sizes() == ids.sizes(), "weights: ", weights.sizes(), ": must be as ids ", ids.sizes());
}

Tensor fused_moe(const Tensor& x, const Tensor& w13, const Tensor& s13, const MaybeTensor& z13, const Tensor& w2,
                 const Tensor& s2, const MaybeTensor& z2, const Tensor& ids, const Tensor& weights, bool half_sums) {
    check_rows(x);
    const int64_t columns = check_weight({"w13", "s13", "z13"}, w13, s13, z13, 3, x.scalar_type(), x.size(1));
    const int64_t n = check_weight({"w2", "s2", "z2"}, w2, s2, z2, 3, x.scalar_type(), columns / 2);
    TORCH_CHECK(n == x.size(1) && w2.size(0) == w13.size(0), "w2: ", w2.sizes(), ": must be (E, I, H / 8) where w13 ",
                w13.sizes(), " is (E, H, 2 I / 8)");
    TORCH_CHECK(columns / 2 % kStep == 0, "w13: ", w13.sizes(), ": I must be a multiple of ", kStep);
    TORCH_CHECK(z13.has_value() == z2.has_value(), "z2: ", z2 ? "given" : "absent", ": must be given where z13 is");
    check_routing(x, ids, weights);
    const at::OptionalDeviceGuard guard(at::device_of(x));
    Tensor y = at::empty(x.sizes(), x.options());
    EXEC_NPU_CMD_EXT(aclnnUmbraFusedMoeW4a16, x, w13, s13, z13, w2, s2, z2, ids, weights, half_sums, y);
    return y;
}

void check_group(const char* name, int64_t group, int64_t rows) {
    TORCH_CHECK((group == 32 || group == 64 || group == 128) && rows % group == 0, name, ": ", group,
                ": must be 32, 64 or 128, and divide ", rows);
}

Tensor fused_moe_slots(const Tensor& x, const Tensor& arena, const Tensor& places, const Tensor& ids,
                       const Tensor& weights, int64_t inner, int64_t group, int64_t group2, bool zeros,
                       bool half_sums) {
    check_rows(x);
    check_kept("arena", arena, at::kByte);
    check_kept("places", places, at::kInt);
    TORCH_CHECK(arena.dim() == 1, "arena: ", arena.sizes(), ": must have one dimension");
    TORCH_CHECK(places.dim() == 1 && places.size(0) >= 1 && places.size(0) <= kMostExperts, "places: ", places.sizes(),
                ": must have one dimension, of 1 to ", kMostExperts, " experts");
    TORCH_CHECK(inner >= kStep && inner % kStep == 0, "inner: ", inner, ": must be a multiple of ", kStep);
    check_group("group", group, x.size(1));
    check_group("group2", group2, inner);
    check_routing(x, ids, weights);
    const at::OptionalDeviceGuard guard(at::device_of(x));
    Tensor y = at::empty(x.sizes(), x.options());
    EXEC_NPU_CMD_EXT(aclnnUmbraFusedMoeSlotsW4a16, x, arena, places, ids, weights, inner, group, group2, zeros,
                     half_sums, y);
    return y;
}

Tensor gemv(const Tensor& x, const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, bool half_sums) {
    check_rows(x);
    const int64_t n = check_weight({"w", "scales", "zeros"}, w, scales, zeros, 2, x.scalar_type(), x.size(1));
    const at::OptionalDeviceGuard guard(at::device_of(x));
    Tensor y = at::empty({x.size(0), n}, x.options());
    EXEC_NPU_CMD_EXT(aclnnUmbraGemvW4a16, x, w, scales, zeros, half_sums, y);
    return y;
}

}  // namespace

TORCH_LIBRARY_IMPL(umbra, PrivateUse1, ops) {
    ops.impl("fused_moe_w4a16", fused_moe);
    ops.impl("fused_moe_slots_w4a16", fused_moe_slots);
    ops.impl("gemv_w4a16", gemv);
}
