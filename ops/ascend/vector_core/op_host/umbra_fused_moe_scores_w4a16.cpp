// y (T, H) as umbra_fused_moe_w4a16 computes it, with the experts that the router's scores (T, experts of all ranks)
// choose. The experts here begin with number first_expert. bias (experts of all ranks) is added to sigmoids only.
#include "umbra_w4a16.h"

namespace optiling {

REGISTER_TILING_DATA_CLASS(UmbraFusedMoeScoresW4a16, UmbraGemvTiling)

namespace fused_moe_scores {

using namespace umbra::fused_moe_scores_w4a16;

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
        umbra::fused_moe_scores_w4a16::define(*this);
        SetInferShape(umbra::shape_of_x).SetInferDataType(umbra::type_of_x);
        AICore().SetTiling(optiling::fused_moe_scores::tiling).AddConfig("ascend910b").AddConfig("ascend910_93");
    }
};
OP_ADD(UmbraFusedMoeScoresW4a16);

}  // namespace ops
