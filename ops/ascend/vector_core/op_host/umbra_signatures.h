// Written by headers.py from signatures.py; change it there.
// clang-format off
#pragma once
#include "umbra_definitions.h"

namespace umbra {

namespace fused_moe_w4a16 {
enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, IDS, WEIGHTS };
enum Attribute : size_t { GROUP, GROUP2, FLOAT_SUMS };
inline void define(ops::OpDef& op) {
    rows(op.Input("x"), ops::REQUIRED, 1);
    fixed(op.Input("w13"), ops::REQUIRED, ge::DT_UINT8, 1);
    rows(op.Input("s13"), ops::REQUIRED, 1);
    rows(op.Input("z13"), ops::OPTIONAL, 1);
    fixed(op.Input("w2"), ops::REQUIRED, ge::DT_UINT8, 1);
    rows(op.Input("s2"), ops::REQUIRED, 1);
    rows(op.Input("z2"), ops::OPTIONAL, 1);
    fixed(op.Input("ids"), ops::REQUIRED, ge::DT_INT32, 1);
    rows(op.Input("weights"), ops::REQUIRED, 1);
    rows(op.Output("y"), ops::REQUIRED, 1);
    op.Attr("group").AttrType(ops::REQUIRED).Int();
    op.Attr("group2").AttrType(ops::REQUIRED).Int();
    op.Attr("float_sums").AttrType(ops::OPTIONAL).Bool(false);
}
}  // namespace fused_moe_w4a16

namespace fused_moe_scores_w4a16 {
enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, SCORES, BIAS };
enum Attribute : size_t { TOP_K, SIGMOID, FIRST_EXPERT, GROUP, GROUP2, FLOAT_SUMS };
inline void define(ops::OpDef& op) {
    rows(op.Input("x"), ops::REQUIRED, 2);
    fixed(op.Input("w13"), ops::REQUIRED, ge::DT_UINT8, 2);
    rows(op.Input("s13"), ops::REQUIRED, 2);
    rows(op.Input("z13"), ops::OPTIONAL, 2);
    fixed(op.Input("w2"), ops::REQUIRED, ge::DT_UINT8, 2);
    rows(op.Input("s2"), ops::REQUIRED, 2);
    rows(op.Input("z2"), ops::OPTIONAL, 2);
    scores(op.Input("scores"), ops::REQUIRED);
    fixed(op.Input("bias"), ops::OPTIONAL, ge::DT_FLOAT, 2);
    rows(op.Output("y"), ops::REQUIRED, 2);
    op.Attr("top_k").AttrType(ops::REQUIRED).Int();
    op.Attr("sigmoid").AttrType(ops::REQUIRED).Bool();
    op.Attr("first_expert").AttrType(ops::REQUIRED).Int();
    op.Attr("group").AttrType(ops::REQUIRED).Int();
    op.Attr("group2").AttrType(ops::REQUIRED).Int();
    op.Attr("float_sums").AttrType(ops::OPTIONAL).Bool(false);
}
}  // namespace fused_moe_scores_w4a16

namespace fused_moe_slots_w4a16 {
enum Place : size_t { X, ARENA, PLACES, IDS, WEIGHTS };
enum Attribute : size_t { INNER, GROUP, GROUP2, ZEROS, FLOAT_SUMS };
inline void define(ops::OpDef& op) {
    rows(op.Input("x"), ops::REQUIRED, 1);
    fixed(op.Input("arena"), ops::REQUIRED, ge::DT_UINT8, 1);
    fixed(op.Input("places"), ops::REQUIRED, ge::DT_INT32, 1);
    fixed(op.Input("ids"), ops::REQUIRED, ge::DT_INT32, 1);
    rows(op.Input("weights"), ops::REQUIRED, 1);
    rows(op.Output("y"), ops::REQUIRED, 1);
    op.Attr("inner").AttrType(ops::REQUIRED).Int();
    op.Attr("group").AttrType(ops::REQUIRED).Int();
    op.Attr("group2").AttrType(ops::REQUIRED).Int();
    op.Attr("zeros").AttrType(ops::REQUIRED).Bool();
    op.Attr("float_sums").AttrType(ops::OPTIONAL).Bool(false);
}
}  // namespace fused_moe_slots_w4a16

namespace gemv_w4a16 {
enum Place : size_t { X, W, SCALES, ZEROS };
enum Attribute : size_t { GROUP, FLOAT_SUMS };
inline void define(ops::OpDef& op) {
    rows(op.Input("x"), ops::REQUIRED, 1);
    fixed(op.Input("w"), ops::REQUIRED, ge::DT_UINT8, 1);
    rows(op.Input("scales"), ops::REQUIRED, 1);
    rows(op.Input("zeros"), ops::OPTIONAL, 1);
    rows(op.Output("y"), ops::REQUIRED, 1);
    op.Attr("group").AttrType(ops::REQUIRED).Int();
    op.Attr("float_sums").AttrType(ops::OPTIONAL).Bool(false);
}
}  // namespace gemv_w4a16

namespace unpack_w4a16 {
enum Place : size_t { W, SCALES, ZEROS };
enum Attribute : size_t { GROUP, ORDERED, PAIRS, TILES };
inline void define(ops::OpDef& op) {
    fixed(op.Input("w"), ops::REQUIRED, ge::DT_UINT8, 1);
    rows(op.Input("scales"), ops::REQUIRED, 1);
    rows(op.Input("zeros"), ops::OPTIONAL, 1);
    rows(op.Output("y"), ops::REQUIRED, 1);
    op.Attr("group").AttrType(ops::REQUIRED).Int();
    op.Attr("ordered").AttrType(ops::REQUIRED).Bool();
    op.Attr("pairs").AttrType(ops::REQUIRED).Bool();
    op.Attr("tiles").AttrType(ops::REQUIRED).Bool();
}
}  // namespace unpack_w4a16

}  // namespace umbra
