// Op definitions: keeps the parts that the twin reads (names, presence, types, functions), and ignores the rest.
#pragma once
#include <deque>
#include <functional>
#include <map>
#include <memory>

#include "gert.h"

namespace ops {

enum Option { REQUIRED, OPTIONAL, DYNAMIC };

class OpParamDef {
public:
    explicit OpParamDef(std::string name_) : name(std::move(name_)) {}
    OpParamDef& ParamType(Option presence_) { return presence = presence_, *this; }
    OpParamDef& DataType(std::vector<ge::DataType> types_) { return types = std::move(types_), *this; }
    OpParamDef& Format(std::vector<ge::Format> formats_) { return formats = std::move(formats_), *this; }
    OpParamDef& UnknownShapeFormat(std::vector<ge::Format>) { return *this; }
    OpParamDef& AutoContiguous() { return *this; }
    std::string name;
    Option presence = REQUIRED;
    std::vector<ge::DataType> types;
    std::vector<ge::Format> formats;
};

class OpAttrDef {
public:
    explicit OpAttrDef(std::string name_) : name(std::move(name_)) {}
    OpAttrDef& AttrType(Option presence_) { return presence = presence_, *this; }
    OpAttrDef& Bool() { return is_bool = true, *this; }
    OpAttrDef& Bool(bool value_) { return is_bool = true, value = value_, *this; }
    OpAttrDef& Int() { return *this; }
    std::string name;
    Option presence = REQUIRED;
    bool is_bool = false;
    int64_t value = 0;  // the value if none is given
};

class OpAICoreConfig {};

class OpAICoreDef {
public:
    using Tiling = ge::graphStatus (*)(gert::TilingContext*);
    OpAICoreDef& SetTiling(Tiling tiling_) { return tiling = tiling_, *this; }
    OpAICoreDef& AddConfig(const char* chip) { return chips.push_back(chip), *this; }
    OpAICoreDef& AddConfig(const char* chip, OpAICoreConfig&) { return chips.push_back(chip), *this; }
    Tiling tiling = nullptr;
    std::vector<std::string> chips;
};

class OpDef {
public:
    using InferShape = ge::graphStatus (*)(gert::InferShapeContext*);
    using InferDataType = ge::graphStatus (*)(gert::InferDataTypeContext*);
    explicit OpDef(const char* name) : type(name) {}
    OpParamDef& Input(const char* name) { return inputs.emplace_back(name); }
    OpParamDef& Output(const char* name) { return outputs.emplace_back(name); }
    OpAttrDef& Attr(const char* name) { return attributes.emplace_back(name); }
    OpDef& SetInferShape(InferShape function) { return infer_shape = function, *this; }
    OpDef& SetInferDataType(InferDataType function) { return infer_type = function, *this; }
    OpAICoreDef& AICore() { return core; }
    std::string type;
    std::deque<OpParamDef> inputs, outputs;
    std::deque<OpAttrDef> attributes;
    InferShape infer_shape = nullptr;
    InferDataType infer_type = nullptr;
    OpAICoreDef core;
};

inline std::map<std::string, std::unique_ptr<OpDef>>& registry() {
    static std::map<std::string, std::unique_ptr<OpDef>> ops;
    return ops;
}

}  // namespace ops

#define OP_ADD(name) static const bool added_##name = (::ops::registry()[#name] = std::make_unique<name>(#name), true)
