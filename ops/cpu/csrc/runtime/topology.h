// The machine's NUMA nodes and physical cores, read from sysfs, and which threads go where.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace umbra {

constexpr int kMostCpus = 1024;  // CPUs and nodes with higher numbers are not understood; a cpu_set_t has as many

struct Node {
    int memory;  // the node's number; -1: the machine has one node, so there is nothing to pin or to bind
    std::vector<std::vector<int>> cores;  // the CPUs of each physical core that this process may use
};

// Threads that belong together: where they run and where their weights lie.
struct Team {
    int memory = -1;  // node number for mbind; -1: anywhere
    int threads = 1;
    std::vector<int> cpus;  // each thread may run on all of them: within a node the scheduler balances; empty: anywhere
};

// The CPUs of this thread's affinity mask.
std::vector<int> allowed_cpus();

// The nodes below `root` (/sys/devices/system) that have CPUs among `allowed`. A node without CPUs is left out; on one
// without memory mbind is refused and first touch finds the nearest memory. Where files are missing, malformed or
// contradict each other the result is one node with all of `allowed`.
std::vector<Node> read_nodes(const std::string& root, const std::vector<int>& allowed);

// The cores of rank `rank` of `ranks` on this machine: contiguous, so that a rank is on few nodes. Never empty: with
// more ranks than cores they share.
std::vector<Node> share(const std::vector<Node>& nodes, int rank, int ranks);

// `threads` spread over the nodes in proportion to their cores. Every node is used when there are threads enough.
std::vector<Team> plan(const std::vector<Node>& nodes, int threads);

// `plan` for two pools at once. Where there are cores enough, none is in both: the shadow has as many as it has threads,
// the last ones of each node, and the device the others; both are then pinned, on machines of one node too. Two cores are
// never enough: there the system's scheduler does better, whatever else is running.
std::pair<std::vector<Team>, std::vector<Team>> divide(const std::vector<Node>& nodes, int device, int shadow);

}  // namespace umbra
