// Communicators that are created at once and keep their configuration. Their collectives move no data.
#include <sys/uio.h>
#include <unistd.h>

#include <cstring>
#include <map>
#include <mutex>

#include "fake.h"
#include "third_party/hccl/inc/hccl/hccl.h"

namespace {

struct Communicator {
    std::string name;
    uint32_t ranks, rank;
};

std::mutex guard;
std::map<std::string, fake::Object> named;  // communicators as arguments; none is ever removed

HcclResult open(uint32_t ranks, uint32_t rank, const HcclCommConfig* config, HcclComm* made) {
    auto* c = new Communicator{config ? config->hcclCommName : "", ranks, rank};
    {
        std::lock_guard<std::mutex> lock(guard);
        fake::Object argument{"group=" + c->name};
        argument.bytes = config ? size_t(config->hcclBufferSize) << 20 : 0;
        named[c->name] = argument;
    }
    std::string line =
        "hccl open name=" + c->name + " ranks=" + std::to_string(ranks) + " rank=" + std::to_string(rank);
    if (config) {
        auto set = [](uint32_t value) {
            return value == HCCL_COMM_BUFFSIZE_CONFIG_NOT_SET ? "unset" : std::to_string(value);
        };
        line += " buffer=" + set(config->hcclBufferSize) + " expansion=" + std::to_string(config->hcclOpExpansionMode) +
                " deterministic=" + set(config->hcclDeterministic);
    }
    fake::say(line);
    return *made = c, HCCL_SUCCESS;
}

std::string type_name(HcclDataType type) {
    static const std::map<int, const char*> names = {
        {HCCL_DATA_TYPE_INT8, "int8"},    {HCCL_DATA_TYPE_INT16, "int16"},    {HCCL_DATA_TYPE_INT32, "int32"},
        {HCCL_DATA_TYPE_FP16, "float16"}, {HCCL_DATA_TYPE_FP32, "float32"},   {HCCL_DATA_TYPE_INT64, "int64"},
        {HCCL_DATA_TYPE_UINT8, "uint8"},  {HCCL_DATA_TYPE_BFP16, "bfloat16"}, {HCCL_DATA_TYPE_FP64, "float64"},
    };
    auto found = names.find(type);
    return found == names.end() ? "type" + std::to_string(type) : found->second;
}

// Logs one line for each collective. If elements are counted for each rank, the counts are not added up.
HcclResult move(const char* what, HcclDataType type, HcclComm comm, aclrtStream stream, const std::string& count) {
    const auto* c = static_cast<const Communicator*>(comm);
    const std::string line = "hccl " + std::string(what) + " " + count + " " + type_name(type) + " name=" + c->name +
                             " ranks=" + std::to_string(c->ranks);
    return fake::task(stream, line, [] {}) ? HCCL_E_RUNTIME : HCCL_SUCCESS;
}

}  // namespace

// The system copies what the word points to, since it may be no address at all.
const fake::Object* fake::communicator(uintptr_t word) {
    char name[33] = {};  // torch_npu gives short ones
    iovec here{name, sizeof name - 1}, there{reinterpret_cast<void*>(word), sizeof name - 1};
    if (word < 1 << 16 || process_vm_readv(getpid(), &here, 1, &there, 1, 0) <= 0) return nullptr;
    std::lock_guard<std::mutex> lock(guard);
    auto found = named.find(name);
    return found == named.end() || found->first.empty() ? nullptr : &found->second;
}

extern "C" {

uint32_t HcclGetCommConfigCapability() { return HCCL_COMM_CONFIG_RESERVED; }
HcclResult HcclGetRootInfo(HcclRootInfo* root) { return memset(root, 7, sizeof *root), HCCL_SUCCESS; }
HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo*, uint32_t rank, HcclComm* made) {
    return open(ranks, rank, nullptr, made);
}
HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo*, uint32_t rank, const HcclCommConfig* config,
                                      HcclComm* made) {
    return open(ranks, rank, config, made);
}
HcclResult HcclCreateSubCommConfig(HcclComm*, uint32_t ranks, uint32_t*, uint64_t, uint32_t rank,
                                   HcclCommConfig* config, HcclComm* made) {
    return open(ranks, rank, config, made);
}
HcclResult HcclCommDestroy(HcclComm comm) { return delete static_cast<Communicator*>(comm), HCCL_SUCCESS; }
HcclResult HcclGetCommName(HcclComm comm, char* name) {
    const std::string& own = static_cast<const Communicator*>(comm)->name;
    return memcpy(name, own.c_str(), own.size() + 1), HCCL_SUCCESS;
}
HcclResult HcclGetRankSize(HcclComm comm, uint32_t* ranks) {
    return *ranks = static_cast<const Communicator*>(comm)->ranks, HCCL_SUCCESS;
}
HcclResult HcclGetRankId(HcclComm comm, uint32_t* rank) {
    return *rank = static_cast<const Communicator*>(comm)->rank, HCCL_SUCCESS;
}
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) { return *error = HCCL_SUCCESS; }

HcclResult HcclAllReduce(void*, void*, uint64_t n, HcclDataType type, HcclReduceOp, HcclComm c, aclrtStream s) {
    return move("AllReduce", type, c, s, std::to_string(n));
}
HcclResult HcclBroadcast(void*, uint64_t n, HcclDataType type, uint32_t, HcclComm c, aclrtStream s) {
    return move("Broadcast", type, c, s, std::to_string(n));
}
HcclResult HcclReduceScatter(void*, void*, uint64_t n, HcclDataType type, HcclReduceOp, HcclComm c, aclrtStream s) {
    return move("ReduceScatter", type, c, s, std::to_string(n));
}
HcclResult HcclAllGather(void*, void*, uint64_t n, HcclDataType type, HcclComm c, aclrtStream s) {
    return move("AllGather", type, c, s, std::to_string(n));
}
HcclResult HcclAlltoAll(const void*, uint64_t n, HcclDataType type, const void*, uint64_t, HcclDataType, HcclComm c,
                        aclrtStream s) {
    return move("AlltoAll", type, c, s, std::to_string(n));
}
HcclResult HcclAlltoAllV(const void*, const void*, const void*, HcclDataType type, const void*, const void*,
                         const void*, HcclDataType, HcclComm c, aclrtStream s) {
    return move("AlltoAllV", type, c, s, "per-rank");
}
HcclResult HcclAlltoAllVC(const void*, const void*, HcclDataType type, const void*, HcclDataType, HcclComm c,
                          aclrtStream s) {
    return move("AlltoAllVC", type, c, s, "per-rank");
}
HcclResult HcclReduce(void*, void*, uint64_t n, HcclDataType type, HcclReduceOp, uint32_t, HcclComm c, aclrtStream s) {
    return move("Reduce", type, c, s, std::to_string(n));
}
HcclResult HcclScatter(void*, void*, uint64_t n, HcclDataType type, uint32_t, HcclComm c, aclrtStream s) {
    return move("Scatter", type, c, s, std::to_string(n));
}
HcclResult HcclReduceScatterV(void*, const void*, const void*, void*, uint64_t n, HcclDataType type, HcclReduceOp,
                              HcclComm c, aclrtStream s) {
    return move("ReduceScatterV", type, c, s, std::to_string(n));
}
HcclResult HcclAllGatherV(void*, uint64_t n, void*, const void*, const void*, HcclDataType type, HcclComm c,
                          aclrtStream s) {
    return move("AllGatherV", type, c, s, std::to_string(n));
}
HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm c, aclrtStream s) {
    for (uint32_t i = 0; i < count; ++i)
        move(items[i].sendRecvType == HCCL_SEND ? "Send" : "Recv", items[i].dataType, c, s,
             std::to_string(items[i].count));
    return HCCL_SUCCESS;
}
HcclResult HcclSend(void*, uint64_t n, HcclDataType type, uint32_t, HcclComm c, aclrtStream s) {
    return move("Send", type, c, s, std::to_string(n));
}
HcclResult HcclRecv(void*, uint64_t n, HcclDataType type, uint32_t, HcclComm c, aclrtStream s) {
    return move("Recv", type, c, s, std::to_string(n));
}

}  // extern "C"
