// aclnn kernels. Each has two functions: NameGetWorkspaceSize(arguments..., &bytes, &executor) and, called later and
// perhaps on another thread, Name(workspace, bytes, executor, stream). The generated trampolines (see generate.py) all
// call fake_aclnn.
//
// A trampoline does not have its kernel's signature. It reads its arguments as a sequence of 64-bit words until it
// finds two neighbours that point to zeroes on the caller's stack: &bytes and &executor. Words that point to live
// objects made by aclCreate* can be recognised as arguments, and so can the name of a communicator that is open; plain
// numbers, other strings and absent tensors cannot. In calls
// of our own operators, booleans that are true and numbers above 1 can be recognised as well, since these operators
// have no other plain arguments.
#include <cstdarg>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <vector>

#include "fake.h"

namespace {

using fake::Object;

constexpr int kMostWords = 96;
constexpr long kInvalid = 161002;           // ACLNN_ERR_PARAM_INVALID
constexpr uintptr_t kMostNumber = 1 << 16;  // below every address
constexpr uintptr_t kFrames = 1 << 18;      // largest distance of the caller's variables on the stack

std::mutex guard;
std::set<const Object*> alive;
struct Plan {
    std::string text, memory;
};
std::map<const void*, Plan> planned;  // arguments of kernels that were sized and are not launched yet

const Object* keep(Object object) {
    auto* kept = new Object(std::move(object));
    std::lock_guard<std::mutex> lock(guard);
    alive.insert(kept);
    return kept;
}

// `object` may be null, since absent tensors are destroyed as well.
int drop(const Object* object) {
    {
        std::lock_guard<std::mutex> lock(guard);
        if (!alive.erase(object)) return ACL_SUCCESS;
    }
    for (const Object* member : object->members) drop(member);
    delete object;
    return ACL_SUCCESS;
}

template <class T> std::string row(const T* values, uint64_t count) {
    std::string text;
    for (uint64_t i = 0; i < count; ++i) text += (i ? "," : "") + std::to_string(values[i]);
    return text;
}

const Object* keep_list(const Object* const* values, uint64_t count) {
    std::string text, memory;
    for (uint64_t i = 0; i < count; ++i) {
        text += (i ? " " : "") + (values[i] ? values[i]->text : "none");
        if (values[i]) memory += values[i]->memory;
    }
    return keep({"[" + text + "]", -1, {}, {values, values + count}, 0, memory});
}

bool contiguous(const int64_t* shape, const int64_t* strides, uint64_t rank) {
    int64_t expected = 1;
    for (uint64_t i = rank; i-- > 0; expected *= shape[i])
        if (shape[i] != 1 && strides[i] != expected) return false;
    return true;
}

bool plain(int format) { return format == ACL_FORMAT_ND || format == ACL_FORMAT_NCHW || format == ACL_FORMAT_NCL; }

// Whether the word points to eight zero bytes in the stack frames above this one.
bool zero_on_stack(uintptr_t word, uintptr_t here) {
    return word > here && word - here < kFrames && word % 8 == 0 && !*reinterpret_cast<const uint64_t*>(word);
}

long plan(const std::string& kernel, long first, va_list rest) {
    const auto here = reinterpret_cast<uintptr_t>(&first);
    const bool own = !kernel.compare(0, 10, "aclnnUmbra");
    const bool communicates = !kernel.compare(0, 18, "aclnnMoeDistribute");
    std::string text, memory;
    std::vector<const Object*> arguments;
    uintptr_t word = first, before = 0;
    for (int i = 0; i < kMostWords; ++i, before = word, word = va_arg(rest, long)) {
        if (zero_on_stack(before, here) && zero_on_stack(word, here) && before != word) {
            void* executor = fake::handle();
            *reinterpret_cast<void**>(word) = executor;
            std::lock_guard<std::mutex> lock(guard);
            if (const std::string rule = fake::broken_rule(kernel, arguments); !rule.empty())
                return fake::violation(kernel + text + ": " + rule), kInvalid;
            planned[executor] = {text, memory};
            return 0;
        }
        std::lock_guard<std::mutex> lock(guard);
        auto* object = reinterpret_cast<const Object*>(word);
        if (alive.count(object)) {
            text += " " + object->text;
            memory += object->memory;
            arguments.push_back(object);
        } else if (const Object* group = communicates ? fake::communicator(word) : nullptr) {
            text += " " + group->text;
            arguments.push_back(group);
        } else if (own && word == 1)
            text += " true";
        else if (own && word > 1 && word < kMostNumber)
            text += " " + std::to_string(word);
    }
    return 0;  // the end was not found: the log will have only the name
}

}  // namespace

std::string fake::type_name(int type) {
    static const std::map<int, const char*> names = {
        {ACL_FLOAT, "float32"}, {ACL_FLOAT16, "float16"}, {ACL_INT8, "int8"},      {ACL_INT32, "int32"},
        {ACL_UINT8, "uint8"},   {ACL_INT16, "int16"},     {ACL_UINT16, "uint16"},  {ACL_UINT32, "uint32"},
        {ACL_INT64, "int64"},   {ACL_UINT64, "uint64"},   {ACL_DOUBLE, "float64"}, {ACL_BOOL, "bool"},
        {ACL_BF16, "bfloat16"}, {ACL_INT4, "int4"},
    };
    auto found = names.find(type);
    return found == names.end() ? "type" + std::to_string(type) : found->second;
}

extern "C" {

long fake_aclnn(const char* name, long first, va_list rest) {
    constexpr const char* sizing = "WorkspaceSize";
    if (strlen(name) > strlen(sizing) && !strcmp(name + strlen(name) - strlen(sizing), sizing))
        return plan({name, strlen(name) - strlen(sizing) - strlen("Get")}, first, rest);
    va_arg(rest, long);  // bytes of workspace
    const void* executor = va_arg(rest, void*);
    aclrtStream stream = va_arg(rest, void*);
    Plan arguments;
    {
        std::lock_guard<std::mutex> lock(guard);
        auto found = planned.find(executor);
        if (found != planned.end()) {
            arguments = found->second;
            planned.erase(found);
        }
    }
    return fake::task(stream, name + arguments.text, [] {}, arguments.memory);
}

// The text of a tensor is (2,3)bfloat16, with :NZ or :format4 if it is not plain, and @strides(1,2) if not contiguous.
const Object* aclCreateTensor(const int64_t* shape, uint64_t rank, int type, const int64_t* strides, int64_t offset,
                              int format, const int64_t*, uint64_t, void* storage) {
    std::string text = "(" + row(shape, rank) + ")" + fake::type_name(type);
    if (!plain(format)) text += format == ACL_FORMAT_FRACTAL_NZ ? ":NZ" : ":format" + std::to_string(format);
    if (!contiguous(shape, strides, rank)) text += "@strides(" + row(strides, rank) + ")";
    const size_t bytes = aclDataTypeSize(static_cast<aclDataType>(type));
    int64_t last = 0;
    for (uint64_t i = 0; i < rank && last >= 0; ++i) last = shape[i] ? last + (shape[i] - 1) * strides[i] : -1;
    const std::string memory = fake::range(static_cast<char*>(storage) + offset * bytes, (last + 1) * bytes);
    return keep({text, type, {shape, shape + rank}, {}, bytes, memory});
}
aclError aclGetViewShape(const Object* tensor, int64_t** shape, uint64_t* rank) {
    *rank = tensor->shape.size();
    *shape = new int64_t[*rank];  // the caller deletes it
    memcpy(*shape, tensor->shape.data(), *rank * sizeof(int64_t));
    return ACL_SUCCESS;
}
size_t aclDataTypeSize(aclDataType type) {
    switch (type) {
        case ACL_INT8:
        case ACL_UINT8:
        case ACL_BOOL: return 1;
        case ACL_FLOAT16:
        case ACL_BF16:
        case ACL_INT16:
        case ACL_UINT16: return 2;
        case ACL_INT64:
        case ACL_UINT64:
        case ACL_DOUBLE: return 8;
        default: return 4;
    }
}
// Returns the shape of a tensor's storage in another format. FRACTAL_NZ has columns in strips of 32 bytes, and rows in
// groups of sixteen.
aclError aclnnNpuFormatCastCalculateSizeAndFormat(const Object* tensor, int format, int, int64_t** storage,
                                                  uint64_t* rank, int* actual) {
    std::vector<int64_t> shape = tensor->shape;
    if (format == ACL_FORMAT_FRACTAL_NZ && shape.size() >= 2) {
        const int64_t strip = 32 / tensor->bytes, columns = shape.back(), rows = shape[shape.size() - 2];
        shape.resize(shape.size() - 2);
        shape.insert(shape.end(), {(columns + strip - 1) / strip, (rows + 15) / 16, 16, strip});
    }
    *actual = format;
    *rank = shape.size();
    *storage = new int64_t[*rank];  // the caller deletes it
    memcpy(*storage, shape.data(), *rank * sizeof(int64_t));
    return ACL_SUCCESS;
}
const Object* aclCreateScalar(void*, int type) { return keep({"scalar:" + fake::type_name(type)}); }
const Object* aclCreateIntArray(const int64_t* values, uint64_t count) {
    return keep({"ints(" + row(values, count) + ")"});
}
const Object* aclCreateFloatArray(const float* values, uint64_t count) {
    return keep({"floats(" + row(values, count) + ")"});
}
const Object* aclCreateBoolArray(const bool* values, uint64_t count) {
    return keep({"bools(" + row(values, count) + ")"});
}
const Object* aclCreateTensorList(const Object* const* values, uint64_t count) { return keep_list(values, count); }
const Object* aclCreateScalarList(const Object* const* values, uint64_t count) { return keep_list(values, count); }
int aclDestroyTensor(const Object* object) { return drop(object); }
int aclDestroyScalar(const Object* object) { return drop(object); }
int aclDestroyIntArray(const Object* object) { return drop(object); }
int aclDestroyFloatArray(const Object* object) { return drop(object); }
int aclDestroyBoolArray(const Object* object) { return drop(object); }
int aclDestroyTensorList(const Object* object) { return drop(object); }
int aclDestroyScalarList(const Object* object) { return drop(object); }

}  // extern "C"
