// y (T, H) as umbra_fused_moe_w4a16 computes it, with the experts that the router's scores (T, experts of all ranks)
// choose. The experts here begin with number first_expert. bias (experts of all ranks) is added to sigmoids only.
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeScoresW4a16, UmbraGemvTiling)

namespace fused_moe_scores {

enum Place : size_t { X, W13, S13, Z13, W2, S2, Z2, SCORES, BIAS };

enum Attribute : size_t { TOP_K, SIGMOID, FIRST_EXPERT, GROUP, GROUP2, FLOAT_SUMS };

ge::graphStatus tiling(gert::TilingContext* context) {
    if (!umbra::has_rank(context, SCORES, 2)) return ge::GRAPH_FAILED;
    const gert::Shape &scores = *umbra::shape_at(context, SCORES), *bias = umbra::shape_at(context, BIAS);
    const int64_t *topK = context->GetAttrs()->GetInt(TOP_K), *first = context->GetAttrs()->GetInt(FIRST_EXPERT);
    const bool* sigmoid = context->GetAttrs()->GetBool(SIGMOID);
    if (!topK || !first || !sigmoid)
        return umbra::fail(context, "top_k, sigmoid and first_expert must be given", 0), ge::GRAPH_FAILED;
    umbra::Problem problem;
    if (!umbra::read_mixture(context, GROUP, *topK, problem)) return ge::GRAPH_FAILED;
    const int64_t scored = scores.GetDim(1);
    if (scores.GetDim(0) != problem.tokens)
        return umbra::fail(context, "scores must have a row for each row of x", scores.GetDim(0)), ge::GRAPH_FAILED;
    if (scored > umbra::kMostScored)
        return umbra::fail(context, "there must be 512 scores for a token at most", scored), ge::GRAPH_FAILED;
    if (*topK > umbra::kMostChosen || *topK > scored)
        return umbra::fail(context, "top_k must be 8 at most, and no more than scores", *topK), ge::GRAPH_FAILED;
    if (*first < 0 || *first + problem.experts > scored)
        return umbra::fail(context, "first_expert and the experts after it must have scores", *first), ge::GRAPH_FAILED;
    if (bias && (!*sigmoid || bias->GetDimNum() != 1 || bias->GetDim(0) != scored))
        return umbra::fail(context, "a bias must be for sigmoids, and have a value for each score", bias->GetDim(0)),
               ge::GRAPH_FAILED;
    const ge::DataType type = context->GetOptionalInputDesc(SCORES)->GetDataType();
    const bool floats = type == ge::DT_FLOAT;
    if (!floats && type != context->GetInputDesc(X)->GetDataType())
        return umbra::fail(context, "scores must be float or of the type of x", type), ge::GRAPH_FAILED;
    return umbra::launch(context, problem, true, FLOAT_SUMS, umbra::Block(), {scored, *first, *sigmoid, floats});
}

}  // namespace fused_moe_scores
}  // namespace optiling

namespace ops {

class UmbraFusedMoeScoresW4a16 : public OpDef {
public:
    explicit UmbraFusedMoeScoresW4a16(const char* name) : OpDef(name) {
        const size_t twice = 2;  // scores are of the type of x, or float
        umbra::activation(Input("x"), twice);
        umbra::fixed(Input("w13"), ge::DT_UINT8, twice);
        umbra::activation(Input("s13"), twice);
        umbra::optional(Input("z13"), twice);
        umbra::fixed(Input("w2"), ge::DT_UINT8, twice);
        umbra::activation(Input("s2"), twice);
        umbra::optional(Input("z2"), twice);
        umbra::variants(Input("scores"), REQUIRED, {ge::DT_FLOAT16, ge::DT_BF16, ge::DT_FLOAT, ge::DT_FLOAT});
        umbra::variants(Input("bias"), OPTIONAL, umbra::repeated(ge::DT_FLOAT, ge::DT_FLOAT, twice));
        umbra::activation(Output("y"), twice);
        Attr("top_k").AttrType(REQUIRED).Int();
        Attr("sigmoid").AttrType(REQUIRED).Bool();
        Attr("first_expert").AttrType(REQUIRED).Int();
        Attr("group").AttrType(REQUIRED).Int();
        Attr("group2").AttrType(REQUIRED).Int();
        Attr("float_sums").AttrType(OPTIONAL).Bool(false);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe_scores::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeScoresW4a16);

}  // namespace ops
