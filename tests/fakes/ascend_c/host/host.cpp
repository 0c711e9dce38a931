// The C interface of compiled op_host sources: runs an op's checks of types, infer-shape, infer-dtype and tiling.
#include <algorithm>

#include "register/op_def_registry.h"

namespace {
std::string list(const std::vector<int64_t>& values) {
    std::string text = "[";
    for (int64_t value : values) text += (text.size() > 1 ? ", " : "") + std::to_string(value);
    return text + "]";
}
// The index of the definition's variant that all types fit, or -1.
int variant(const ops::OpDef& op, const std::vector<gert::Input>& inputs) {
    for (size_t at = 0; at < op.inputs[0].types.size(); ++at) {
        bool fits = true;
        for (size_t input = 0; input < inputs.size(); ++input)
            fits = fits && (!inputs[input].present || op.inputs[input].types.at(at) == inputs[input].desc.type);
        if (fits) return at;
    }
    return -1;
}
std::string launch(const char* type, std::vector<gert::Input> inputs, const std::vector<int64_t>& attributes,
                   uint32_t cores, bool& ok) {
    ok = false;
    const auto found = ops::registry().find(type);
    if (found == ops::registry().end()) return "no such op is registered";
    const ops::OpDef& op = *found->second;
    if (inputs.size() != op.inputs.size()) return "the op has " + std::to_string(op.inputs.size()) + " inputs";
    if (attributes.size() > op.attributes.size())
        return "the op has " + std::to_string(op.attributes.size()) + " attributes";
    for (size_t at = 0; at < inputs.size(); ++at)
        if (!inputs[at].present && op.inputs[at].presence == ops::REQUIRED)
            return "the input " + op.inputs[at].name + " is required";
    if (variant(op, inputs) < 0) return "no variant of the definition has these types";
    gert::InferShapeContext shapes;
    gert::InferDataTypeContext types;
    gert::TilingContext tiling;
    tiling.cores = cores;
    for (size_t at = 0; at < op.attributes.size(); ++at) {
        const ops::OpAttrDef& attribute = op.attributes[at];
        if (at >= attributes.size() && attribute.presence == ops::REQUIRED)
            return "the attribute " + attribute.name + " is required";
        const int64_t value = at < attributes.size() ? attributes[at] : attribute.value;
        tiling.attributes.values.push_back({attribute.is_bool, value != 0, value});
    }
    for (gert::Context* context : std::initializer_list<gert::Context*>{&shapes, &types, &tiling})
        context->type = type, context->inputs = inputs;
    shapes.outputs.resize(op.outputs.size()), types.outputs.resize(op.outputs.size());
    if (op.infer_shape(&shapes) != ge::GRAPH_SUCCESS) return "infer-shape refuses";
    if (op.infer_type(&types) != ge::GRAPH_SUCCESS) return "infer-dtype refuses";
    if (op.core.tiling(&tiling) != ge::GRAPH_SUCCESS) return "tiling refuses";
    std::string text = "{\"outputs\": {";
    for (size_t at = 0; at < op.outputs.size(); ++at)
        text += (at ? ", \"" : "\"") + op.outputs[at].name + "\": [" + list(shapes.outputs[at].dims) + ", " +
                std::to_string(types.outputs[at]) + "]";
    const std::vector<int64_t> data(tiling.tiling.bytes, tiling.tiling.bytes + tiling.tiling.size);
    int64_t workspace = 0;
    for (size_t size : tiling.workspaces) workspace += size;
    ok = true;
    return text + "}, \"tiling\": " + list(data) + ", \"workspace\": " + std::to_string(workspace) +
           ", \"key\": " + std::to_string(tiling.key) + ", \"blocks\": " + std::to_string(tiling.blocks) +
           ", \"schedule_mode\": " + std::to_string(tiling.schedule_mode) + "}";
}
}  // namespace

// `ranks` has -1 for an absent input, `dims` all shapes one after another, and `attributes` the first attributes; the
// others have their defaults. Returns 0 with a JSON result, or 1 with the reason of a refusal.
extern "C" __attribute__((visibility("default"))) int twin_host(const char* type, int count, const int* ranks,
                                                                const int64_t* dims, const int* types,
                                                                int attribute_count, const int64_t* attributes,
                                                                uint32_t cores, char* answer, uint64_t answer_bytes) {
    std::vector<gert::Input> inputs;
    for (int at = 0; at < count; ++at) {
        gert::Input input{ranks[at] >= 0, {}, {static_cast<ge::DataType>(types[at])}};
        for (int dim = 0; dim < ranks[at]; ++dim) input.shape.shape.AppendDim(*dims++);
        inputs.push_back(input);
    }
    bool ok = false;
    const std::string text =
        launch(type, inputs, std::vector<int64_t>(attributes, attributes + attribute_count), cores, ok);
    std::snprintf(answer, answer_bytes, "%s", text.c_str());
    return ok ? 0 : 1;
}
