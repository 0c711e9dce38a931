// Written by headers.py from signatures.py; change it there.
// clang-format off
#pragma once

struct fused_moe_w4a16;
Tensor compute(const fused_moe_w4a16& of);

struct fused_moe_w4a16 {
    const Tensor& x;
    const Tensor& w13;
    const Tensor& s13;
    const MaybeTensor& z13;
    const Tensor& w2;
    const Tensor& s2;
    const MaybeTensor& z2;
    const Tensor& ids;
    const Tensor& weights;
    int64_t group;
    int64_t group2;
    bool float_sums;
    void launch(Tensor& y) const {
        EXEC_NPU_CMD_EXT(aclnnUmbraFusedMoeW4a16, x, w13, s13, z13, w2, s2, z2, ids, weights, group, group2, float_sums, y);
    }
    static Tensor op(const Tensor& x, const Tensor& w13, const Tensor& s13, const MaybeTensor& z13, const Tensor& w2, const Tensor& s2, const MaybeTensor& z2, const Tensor& ids, const Tensor& weights, int64_t group, int64_t group2, bool float_sums) {
        return compute(fused_moe_w4a16{x, w13, s13, z13, w2, s2, z2, ids, weights, group, group2, float_sums});
    }
};

struct fused_moe_scores_w4a16;
Tensor compute(const fused_moe_scores_w4a16& of);

struct fused_moe_scores_w4a16 {
    const Tensor& x;
    const Tensor& w13;
    const Tensor& s13;
    const MaybeTensor& z13;
    const Tensor& w2;
    const Tensor& s2;
    const MaybeTensor& z2;
    const Tensor& scores;
    const MaybeTensor& bias;
    int64_t top_k;
    bool sigmoid;
    int64_t first_expert;
    int64_t group;
    int64_t group2;
    bool float_sums;
    void launch(Tensor& y) const {
        EXEC_NPU_CMD_EXT(aclnnUmbraFusedMoeScoresW4a16, x, w13, s13, z13, w2, s2, z2, scores, bias, top_k, sigmoid, first_expert, group, group2, float_sums, y);
    }
    static Tensor op(const Tensor& x, const Tensor& w13, const Tensor& s13, const MaybeTensor& z13, const Tensor& w2, const Tensor& s2, const MaybeTensor& z2, const Tensor& scores, const MaybeTensor& bias, int64_t top_k, bool sigmoid, int64_t first_expert, int64_t group, int64_t group2, bool float_sums) {
        return compute(fused_moe_scores_w4a16{x, w13, s13, z13, w2, s2, z2, scores, bias, top_k, sigmoid, first_expert, group, group2, float_sums});
    }
};

struct fused_moe_slots_w4a16;
Tensor compute(const fused_moe_slots_w4a16& of);

struct fused_moe_slots_w4a16 {
    const Tensor& x;
    const Tensor& arena;
    const Tensor& places;
    const Tensor& ids;
    const Tensor& weights;
    int64_t inner;
    int64_t group;
    int64_t group2;
    bool zeros;
    bool float_sums;
    void launch(Tensor& y) const {
        EXEC_NPU_CMD_EXT(aclnnUmbraFusedMoeSlotsW4a16, x, arena, places, ids, weights, inner, group, group2, zeros, float_sums, y);
    }
    static Tensor op(const Tensor& x, const Tensor& arena, const Tensor& places, const Tensor& ids, const Tensor& weights, int64_t inner, int64_t group, int64_t group2, bool zeros, bool float_sums) {
        return compute(fused_moe_slots_w4a16{x, arena, places, ids, weights, inner, group, group2, zeros, float_sums});
    }
};

struct gemv_w4a16;
Tensor compute(const gemv_w4a16& of);

struct gemv_w4a16 {
    const Tensor& x;
    const Tensor& w;
    const Tensor& scales;
    const MaybeTensor& zeros;
    int64_t group;
    bool float_sums;
    void launch(Tensor& y) const {
        EXEC_NPU_CMD_EXT(aclnnUmbraGemvW4a16, x, w, scales, zeros, group, float_sums, y);
    }
    static Tensor op(const Tensor& x, const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, int64_t group, bool float_sums) {
        return compute(gemv_w4a16{x, w, scales, zeros, group, float_sums});
    }
};

struct unpack_w4a16;
Tensor compute(const unpack_w4a16& of);

struct unpack_w4a16 {
    const Tensor& w;
    const Tensor& scales;
    const MaybeTensor& zeros;
    int64_t group;
    bool ordered;
    bool pairs;
    void launch(Tensor& y) const {
        const bool tiles = false;
        EXEC_NPU_CMD_EXT(aclnnUmbraUnpackW4a16, w, scales, zeros, group, ordered, pairs, tiles, y);
    }
    static Tensor op(const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, int64_t group, bool ordered, bool pairs) {
        return compute(unpack_w4a16{w, scales, zeros, group, ordered, pairs});
    }
};

struct unpack_tiles_w4a16;
void compute(const unpack_tiles_w4a16& of);

struct unpack_tiles_w4a16 {
    const Tensor& w;
    const Tensor& scales;
    const MaybeTensor& zeros;
    int64_t group;
    bool ordered;
    bool pairs;
    const Tensor& bank;
    void launch(Tensor& y) const {
        const bool tiles = true;
        EXEC_NPU_CMD_EXT(aclnnUmbraUnpackW4a16, w, scales, zeros, group, ordered, pairs, tiles, y);
    }
    static void op(const Tensor& w, const Tensor& scales, const MaybeTensor& zeros, int64_t group, bool ordered, bool pairs, const Tensor& bank) {
        return compute(unpack_tiles_w4a16{w, scales, zeros, group, ordered, pairs, bank});
    }
};

inline void register_ops(torch::Library& ops) {
    ops.impl("fused_moe_w4a16", fused_moe_w4a16::op);
    ops.impl("fused_moe_scores_w4a16", fused_moe_scores_w4a16::op);
    ops.impl("fused_moe_slots_w4a16", fused_moe_slots_w4a16::op);
    ops.impl("gemv_w4a16", gemv_w4a16::op);
    ops.impl("unpack_w4a16", unpack_w4a16::op);
    ops.impl("unpack_tiles_w4a16", unpack_tiles_w4a16::op);
}
