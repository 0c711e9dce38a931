// Devices with host memory as their memory; kernels compute nothing.
// Functions that are not in this folder are generated stubs that return 0.
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>

#include "acl/acl_op_compiler.h"
#include "fake.h"

namespace {

constexpr int kCubeCores = 24, kVectorCores = 48;
constexpr const char* kVersion = "9.1.0";
constexpr int64_t kCacheBytes = 192 << 20;

thread_local int current = -1;
std::mutex guard;
std::map<uintptr_t, std::pair<size_t, aclrtMemLocationType>> blocks;
size_t most_pinned = SIZE_MAX;      // most bytes of one allocation of pinned host memory
size_t most_registered = SIZE_MAX;  // most bytes of registered host memory
std::map<uintptr_t, size_t> registered;

aclError allocate(void** p, size_t bytes, aclrtMemLocationType where) {
    if (fake::inside_callback()) return fake::forbid("allocation");
    if (where == ACL_MEM_LOCATION_TYPE_HOST && bytes > most_pinned) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    if (fake::fault()) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    if (posix_memalign(p, 512, bytes ? bytes : 512)) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    std::lock_guard<std::mutex> lock(guard);
    blocks[reinterpret_cast<uintptr_t>(*p)] = {bytes, where};
    return ACL_SUCCESS;
}

aclError release(void* p) {
    if (fake::inside_callback()) return fake::forbid("free");
    {
        std::lock_guard<std::mutex> lock(guard);
        blocks.erase(reinterpret_cast<uintptr_t>(p));
    }
    free(p);
    return ACL_SUCCESS;
}

aclrtMemcpyKind direction(const aclrtMemcpyBatchAttr& kind) {
    const bool from = kind.srcLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    const bool to = kind.dstLoc.type == ACL_MEM_LOCATION_TYPE_DEVICE;
    return from ? to ? ACL_MEMCPY_DEVICE_TO_DEVICE : ACL_MEMCPY_DEVICE_TO_HOST
           : to ? ACL_MEMCPY_HOST_TO_DEVICE
                : ACL_MEMCPY_HOST_TO_HOST;
}

const char* direction(aclrtMemcpyKind kind) {
    switch (kind) {
        case ACL_MEMCPY_HOST_TO_HOST: return "H2H";
        case ACL_MEMCPY_HOST_TO_DEVICE:
        case ACL_MEMCPY_HOST_TO_BUF_TO_DEVICE: return "H2D";
        case ACL_MEMCPY_DEVICE_TO_HOST: return "D2H";
        case ACL_MEMCPY_DEFAULT: return "default";
        default: return "D2D";
    }
}

aclrtMemLocationType location(const void* p) {
    std::lock_guard<std::mutex> lock(guard);
    auto after = blocks.upper_bound(reinterpret_cast<uintptr_t>(p));
    if (after != blocks.begin()) {
        const auto& [start, block] = *--after;
        if (reinterpret_cast<uintptr_t>(p) < start + block.first) return block.second;
    }
    return ACL_MEM_LOCATION_TYPE_UNREGISTERED;
}

}  // namespace

bool fake::pinned(const void* p) { return location(p) == ACL_MEM_LOCATION_TYPE_HOST; }

const char* fake::cann_version() {
    const char* wanted = getenv("FAKE_CANN_VERSION");
    return wanted ? wanted : kVersion;
}

extern "C" {

void fake_most_pinned(size_t bytes) { most_pinned = bytes; }
void fake_most_registered(size_t bytes) { most_registered = bytes; }
size_t fake_registered() {
    std::lock_guard<std::mutex> lock(guard);
    size_t all = 0;
    for (const auto& [at, bytes] : registered) all += bytes;
    return all;
}

// --- devices
const char* aclrtGetSocName() { return fake::kSoc; }
const char* aclGetRecentErrMsg() { return "fake CANN"; }
aclError aclrtGetDeviceCount(uint32_t* count) { return *count = fake::kDevices, ACL_SUCCESS; }
aclError aclrtSetDevice(int32_t device) {
    if (device < 0 || device >= fake::kDevices) return ACL_ERROR_RT_INVALID_DEVICEID;
    return current = device, ACL_SUCCESS;
}
aclError aclrtGetDevice(int32_t* device) {
    return current < 0 ? ACL_ERROR_RT_CONTEXT_NULL : (*device = current, ACL_SUCCESS);
}
// A context is its device's number plus one.
aclError aclrtGetCurrentContext(aclrtContext* context) {
    return *context = reinterpret_cast<void*>(intptr_t(current < 0 ? 1 : current + 1)), ACL_SUCCESS;
}
aclError aclrtSetCurrentContext(aclrtContext context) {
    return current = static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1, ACL_SUCCESS;
}
aclError aclrtGetPrimaryCtxState(int32_t, uint32_t* flags, int32_t* active) {
    if (flags) *flags = 0;
    return *active = 1, ACL_SUCCESS;
}
aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free, size_t* total) {
    return *free = 60ull << 30, *total = 64ull << 30, ACL_SUCCESS;
}
aclError aclrtGetDeviceResLimit(int32_t, aclrtDevResLimitType type, uint32_t* value) {
    return *value = type == ACL_RT_DEV_RES_CUBE_CORE ? kCubeCores : kVectorCores, ACL_SUCCESS;
}
aclError aclrtGetStreamResLimit(aclrtStream, aclrtDevResLimitType type, uint32_t* value) {
    return aclrtGetDeviceResLimit(0, type, value);
}
aclError aclrtGetDeviceInfo(uint32_t, aclrtDevAttr what, int64_t* value) {
    return *value = what == ACL_DEV_ATTR_VECTOR_CORE_NUM ? kVectorCores : kCubeCores, ACL_SUCCESS;
}
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo what, int64_t* value) {
    *value = what == ACL_DEVICE_INFO_L2_SIZE       ? kCacheBytes
             : what == ACL_DEVICE_INFO_AI_CORE_NUM ? kCubeCores
                                                   : kVectorCores;
    return ACL_SUCCESS;
}
aclError aclGetCannAttribute(aclCannAttr, int32_t* value) { return *value = 1, ACL_SUCCESS; }
aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) { return *value = 0, ACL_SUCCESS; }
size_t aclGetCompileoptSize(aclCompileOpt) { return 16; }
aclError aclGetCompileopt(aclCompileOpt, char* value, size_t bytes) { return memset(value, 0, bytes), ACL_SUCCESS; }
aclError aclsysGetVersionStr(char*, char* version) { return strcpy(version, fake::cann_version()), ACL_SUCCESS; }
aclError aclsysGetCANNVersion(aclCANNPackageName, aclCANNPackageVersion* version) {
    *version = {};
    return strcpy(version->version, fake::cann_version()), ACL_SUCCESS;
}

// --- memory
aclError aclrtMalloc(void** p, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(p, bytes, ACL_MEM_LOCATION_TYPE_DEVICE);
}
aclError aclrtMallocAlign32(void** p, size_t bytes, aclrtMemMallocPolicy) {
    return allocate(p, bytes, ACL_MEM_LOCATION_TYPE_DEVICE);
}
aclError aclrtMallocHost(void** p, size_t bytes) { return allocate(p, bytes, ACL_MEM_LOCATION_TYPE_HOST); }
aclError aclrtMallocHostWithCfg(void** p, uint64_t bytes, aclrtMallocConfig*) { return aclrtMallocHost(p, bytes); }
aclError aclrtFree(void* p) { return release(p); }
aclError aclrtFreeHost(void* p) { return release(p); }
// Whole pages, none of which is registered already; ranges of 128 MB and more are slow.
aclError aclrtHostRegister(void* p, uint64_t bytes, aclrtHostRegisterType, void** device) {
    const uintptr_t at = reinterpret_cast<uintptr_t>(p);
    if (!bytes || at % 4096 || bytes % 4096) return fake::violation("a registered range that is not of whole pages");
    if (bytes >= 128 << 20) return fake::violation("a registered range of 128 MB or more");
    if (fake_registered() + bytes > most_registered) return ACL_ERROR_RT_MEMORY_ALLOCATION;
    std::lock_guard<std::mutex> lock(guard);
    const auto after = registered.lower_bound(at);
    const bool before = after != registered.begin() && std::prev(after)->first + std::prev(after)->second > at;
    if (before || (after != registered.end() && after->first < at + bytes))
        return fake::violation("memory that is registered twice");
    registered[at] = bytes;
    blocks[at] = {bytes, ACL_MEM_LOCATION_TYPE_HOST};
    return *device = p, ACL_SUCCESS;
}
aclError aclrtHostUnregister(void* p) {
    std::lock_guard<std::mutex> lock(guard);
    if (!registered.erase(reinterpret_cast<uintptr_t>(p)))
        return fake::violation("memory that is unregistered without having been registered");
    blocks.erase(reinterpret_cast<uintptr_t>(p));
    return ACL_SUCCESS;
}
aclError aclrtPointerGetAttributes(const void* p, aclrtPtrAttributes* attributes) {
    *attributes = {};
    attributes->location.type = location(p);
    return ACL_SUCCESS;
}
aclError aclrtMemcpy(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind) {
    NOT_IN_A_CALLBACK
    if (fake::capturing()) return ACL_ERROR_RT_CAPTURE_MODE_NOT_SUPPORT;
    if (aclError error = fake::fault()) return error;
    const std::string line = std::string("memcpy ") + direction(kind) + ' ' + std::to_string(bytes);
    fake::say(line);
    fake::given(nullptr, line);
    return memmove(to, from, bytes), ACL_SUCCESS;
}
aclError aclrtMemcpyAsync(void* to, size_t, const void* from, size_t bytes, aclrtMemcpyKind kind, aclrtStream stream) {
    const void* host = kind == ACL_MEMCPY_DEVICE_TO_HOST ? to : kind == ACL_MEMCPY_HOST_TO_DEVICE ? from : nullptr;
    if (host && fake::captured(stream) && !fake::pinned(host))
        return fake::violation("a captured copy of host memory that is not pinned");
    return fake::task(
        stream, std::string("memcpy async ") + direction(kind) + ' ' + std::to_string(bytes),
        [=] { memmove(to, from, bytes); }, fake::range(from, bytes) + fake::range(to, bytes));
}
aclError aclrtMemcpyAsyncWithCondition(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind kind,
                                       aclrtStream stream) {
    return aclrtMemcpyAsync(to, room, from, bytes, kind, stream);
}
aclError aclrtMemcpyBatch(void** to, size_t*, void** from, size_t* bytes, size_t count, aclrtMemcpyBatchAttr* kinds,
                          size_t*, size_t, size_t* failed) {
    for (size_t i = 0; i < count; ++i)
        if (aclError error = aclrtMemcpy(to[i], bytes[i], from[i], bytes[i], direction(*kinds)))
            return *failed = i, error;
    return ACL_SUCCESS;
}
aclError aclrtMemcpyBatchAsync(void** to, size_t*, void** from, size_t* bytes, size_t count,
                               aclrtMemcpyBatchAttr* kinds, size_t*, size_t, size_t*, aclrtStream stream) {
    for (size_t i = 0; i < count; ++i)
        if (aclError error = aclrtMemcpyAsync(to[i], bytes[i], from[i], bytes[i], direction(*kinds), stream))
            return error;
    return ACL_SUCCESS;
}
aclError aclrtMemset(void* to, size_t, int32_t value, size_t bytes) {
    NOT_IN_A_CALLBACK
    return memset(to, value, bytes), ACL_SUCCESS;
}
aclError aclrtMemsetAsync(void* to, size_t, int32_t value, size_t bytes, aclrtStream stream) {
    return fake::task(stream, "memset " + std::to_string(bytes), [=] { memset(to, value, bytes); });
}

// --- streams and events, except functions that wait (these are in streams.cpp)
aclError aclrtCreateStream(aclrtStream* stream) {
    NOT_IN_A_CALLBACK
    return *stream = fake::handle(), ACL_SUCCESS;
}
aclError aclrtCreateStreamWithConfig(aclrtStream* stream, uint32_t, uint32_t) { return aclrtCreateStream(stream); }
aclError aclrtStreamGetId(aclrtStream stream, int32_t* id) { return *id = fake::number(stream), ACL_SUCCESS; }
aclError aclrtCreateEvent(aclrtEvent* event) {
    NOT_IN_A_CALLBACK
    return *event = fake::handle(), ACL_SUCCESS;
}
aclError aclrtCreateEventWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtCreateEventExWithFlag(aclrtEvent* event, uint32_t) { return aclrtCreateEvent(event); }
aclError aclrtQueryEventWaitStatus(aclrtEvent, aclrtEventWaitStatus* s) {
    return *s = ACL_EVENT_WAIT_STATUS_COMPLETE, ACL_SUCCESS;
}
aclError aclrtEventElapsedTime(float* ms, aclrtEvent, aclrtEvent) { return *ms = 0.01f, ACL_SUCCESS; }

// --- operators that torch_npu compiles one by one instead of calling an aclnn kernel
aclError aclopCompileAndExecute(const char* type, int, const aclTensorDesc* const[], const aclDataBuffer* const[], int,
                                const aclTensorDesc* const[], aclDataBuffer* const[], const aclopAttr*, aclopEngineType,
                                aclopCompileType, const char*, aclrtStream stream) {
    return fake::task(stream, std::string("aclop ") + type, [] {});
}
aclError aclopCompileAndExecuteV2(const char* type, int, aclTensorDesc*[], aclDataBuffer*[], int, aclTensorDesc*[],
                                  aclDataBuffer*[], aclopAttr*, aclopEngineType, aclopCompileType, const char*,
                                  aclrtStream stream) {
    return fake::task(stream, std::string("aclop ") + type, [] {});
}

// --- Huawei's bounded C functions, which the wheel expects in CANN's libraries
int strcpy_s(char* to, size_t room, const char* from) { return snprintf(to, room, "%s", from), 0; }
int vsnprintf_s(char* to, size_t room, size_t count, const char* format, va_list values) {
    return vsnprintf(to, count < room ? count + 1 : room, format, values);
}
int snprintf_s(char* to, size_t room, size_t count, const char* format, ...) {
    va_list values;
    va_start(values, format);
    int length = vsnprintf_s(to, room, count, format, values);
    va_end(values);
    return length;
}

}  // extern "C"
