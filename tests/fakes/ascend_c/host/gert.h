// Stand-ins for the parts of CANN's graph engine that op_host sources use: shapes, types, attributes, and the three
// contexts.
//
// Only functions that the project's sources call are here. As in CANN, GetInput* number the inputs that are present,
// and GetOptionalInput* number the inputs of the op's definition.
#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace ge {
using graphStatus = uint32_t;
constexpr graphStatus GRAPH_SUCCESS = 0, GRAPH_FAILED = 0xFFFFFFFF;
enum DataType {
    DT_FLOAT = 0,
    DT_FLOAT16 = 1,
    DT_INT8 = 2,
    DT_INT32 = 3,
    DT_UINT8 = 4,
    DT_INT64 = 9,
    DT_BF16 = 27,
    DT_INT4 = 29
};
enum Format { FORMAT_ND = 2 };
}  // namespace ge

namespace gert {

class Shape {
public:
    Shape() = default;
    Shape(std::initializer_list<int64_t> dims_) : dims(dims_) {}
    size_t GetDimNum() const { return dims.size(); }
    int64_t GetDim(size_t at) const { return at < dims.size() ? dims[at] : INT64_MIN; }
    int64_t GetShapeSize() const {
        int64_t size = 1;
        for (int64_t dim : dims) size *= dim;
        return size;
    }
    void SetDimNum(size_t count) { dims.resize(count); }
    void SetDim(size_t at, int64_t dim) { dims.at(at) = dim; }
    void AppendDim(int64_t dim) { dims.push_back(dim); }
    bool operator==(const Shape& other) const { return dims == other.dims; }
    bool operator!=(const Shape& other) const { return dims != other.dims; }
    std::vector<int64_t> dims;
};

class StorageShape {
public:
    const Shape& GetStorageShape() const { return shape; }
    const Shape& GetOriginShape() const { return shape; }
    Shape shape;
};

class CompileTimeTensorDesc {
public:
    ge::DataType GetDataType() const { return type; }
    ge::DataType type;
};

class TilingData {
public:
    void* GetData() { return bytes; }
    size_t GetCapacity() const { return sizeof bytes; }
    size_t GetDataSize() const { return size; }
    void SetDataSize(size_t size_) { size = size_; }
    alignas(8) uint8_t bytes[2048] = {};
    size_t size = 0;
};

struct Input {  // an input of the op's definition
    bool present;
    StorageShape shape;
    CompileTimeTensorDesc desc;
};

struct Attribute {
    bool is_bool, flag;
    int64_t number;
};

class RuntimeAttrs {  // only booleans and integers
public:
    const bool* GetBool(size_t at) const {
        return at < values.size() && values[at].is_bool ? &values[at].flag : nullptr;
    }
    const int64_t* GetInt(size_t at) const {
        return at < values.size() && !values[at].is_bool ? &values[at].number : nullptr;
    }
    std::vector<Attribute> values;
};

class Context {
public:
    const char* GetNodeType() const { return type.c_str(); }
    const char* GetNodeName() const { return type.c_str(); }
    std::string type;
    std::vector<Input> inputs;

protected:
    const Input* present(size_t at) const {
        for (const Input& input : inputs)
            if (input.present && at-- == 0) return &input;
        return nullptr;
    }
    const Input* defined(size_t at) const { return at < inputs.size() && inputs[at].present ? &inputs[at] : nullptr; }
};

class TilingContext : public Context {
public:
    const StorageShape* GetInputShape(size_t at) const { return present(at) ? &present(at)->shape : nullptr; }
    const StorageShape* GetOptionalInputShape(size_t at) const { return defined(at) ? &defined(at)->shape : nullptr; }
    const CompileTimeTensorDesc* GetInputDesc(size_t at) const { return present(at) ? &present(at)->desc : nullptr; }
    const CompileTimeTensorDesc* GetOptionalInputDesc(size_t at) const {
        return defined(at) ? &defined(at)->desc : nullptr;
    }
    const RuntimeAttrs* GetAttrs() const { return &attributes; }
    void* GetPlatformInfo() const { return const_cast<uint32_t*>(&cores); }
    TilingData* GetRawTilingData() { return &tiling; }
    size_t* GetWorkspaceSizes(size_t count) {
        workspaces.resize(count);
        return workspaces.data();
    }
    ge::graphStatus SetTilingKey(uint64_t key_) { return key = key_, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetBlockDim(uint32_t blocks_) { return blocks = blocks_, ge::GRAPH_SUCCESS; }
    ge::graphStatus SetScheduleMode(uint32_t mode) { return schedule_mode = mode, ge::GRAPH_SUCCESS; }

    uint32_t cores = 0, blocks = 0, schedule_mode = 0;
    uint64_t key = 0;
    TilingData tiling;
    RuntimeAttrs attributes;
    std::vector<size_t> workspaces;
};

class InferShapeContext : public Context {
public:
    const Shape* GetInputShape(size_t at) const { return present(at) ? &present(at)->shape.shape : nullptr; }
    const Shape* GetOptionalInputShape(size_t at) const { return defined(at) ? &defined(at)->shape.shape : nullptr; }
    Shape* GetOutputShape(size_t at) { return at < outputs.size() ? &outputs[at] : nullptr; }
    std::vector<Shape> outputs;
};

class InferDataTypeContext : public Context {
public:
    ge::DataType GetInputDataType(size_t at) const { return present(at)->desc.type; }
    ge::DataType GetOptionalInputDataType(size_t at) const { return defined(at)->desc.type; }
    ge::graphStatus SetOutputDataType(size_t at, ge::DataType type_) {
        return outputs.at(at) = type_, ge::GRAPH_SUCCESS;
    }
    std::vector<ge::DataType> outputs;
};

}  // namespace gert
