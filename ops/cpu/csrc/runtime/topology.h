// The machine's NUMA nodes and physical cores, read from sysfs, and the placement of threads on them.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace umbra {

constexpr int kMostCpus = 1024;  // limit on the numbers of CPUs and nodes; the size of a cpu_set_t

struct Node {
    int memory;  // the node's number; -1: the machine has one node, so nothing is pinned or bound
    std::vector<std::vector<int>> cores;  // the CPUs of each physical core that this process may use
};

// The threads of one node: where they run and where their weights lie.
struct Team {
    int memory = -1;  // node number for mbind; -1: any
    int threads = 1;
    std::vector<int> cpus;  // each thread may run on all of these, and the scheduler balances within a node; empty: any
};

// The CPUs of this thread's affinity mask.
std::vector<int> allowed_cpus();

// The nodes below `root` (/sys/devices/system) that have CPUs among `allowed`. Nodes without CPUs are left out; on
// nodes without memory mbind fails and first touch finds the nearest memory. If files are missing, malformed or
// contradict each other, the result is one node with all of `allowed`.
std::vector<Node> read_nodes(const std::string& root, const std::vector<int>& allowed);

// The cores of rank `rank` of `ranks` on this machine: contiguous, so that a rank uses few nodes. Never empty: if there
// are more ranks than cores, ranks share cores.
std::vector<Node> share(const std::vector<Node>& nodes, int rank, int ranks);

// Spreads `threads` over the nodes in proportion to their cores. Every node is used if there are enough threads.
std::vector<Team> plan(const std::vector<Node>& nodes, int threads);

// `plan` for two pools at once: the device's (main) pool and the shadow pool. If there are enough cores, the pools
// share none: the shadow pool gets as many as it has threads, the last ones of each node, the device pool gets the
// others, and both are pinned, also on machines with one node. Two cores are never enough: there the system's scheduler
// does better.
std::pair<std::vector<Team>, std::vector<Team>> divide(const std::vector<Node>& nodes, int device, int shadow);

}  // namespace umbra
