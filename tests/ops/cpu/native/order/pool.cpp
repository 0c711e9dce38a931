// runtime/pool.cpp in every order: each task runs once, on a thread of its node, and its writes are seen by the caller
// when a job returns and by the tasks of the next job; nobody waits for ever, also at the end.

#include "runtime/pool.h"

#include "machine.h"

using umbra::Pool;
using Teams = std::vector<umbra::Team>;

namespace {

// Two jobs on `teams`; each task of the second reads what others wrote in the first.
void jobs(const Teams& teams, int count, int rounds) {
    std::vector<int> first(count, 0), second(count, 0);
    {
        Pool pool(teams);
        for (int round = 1; round <= rounds; round++) {
            pool.each(count, [&](int task, int) { first[task] += second[(task + 1) % count] + 1; });
            for (int task = 0; task < count; task++)
                machine::demand(first[task] == round, "a task ran once, and its caller sees what it wrote");
        }
    }
}

// Threads of a node take tasks from the same counter; those of two nodes meet only where a job begins and ends.
void one_node() { jobs({{-1, 2, {}}}, 2, 1); }
void two_nodes() { jobs({{-1, 1, {}}, {-1, 1, {}}}, 2, 2); }
void three_nodes() { jobs({{-1, 1, {}}, {-1, 1, {}}, {-1, 1, {}}}, 3, 1); }
void idle() { Pool pool(3); }

// What a task wrote is read by a task of the next job, without the caller reading it between, as ops on a tape do.
void from_task_to_task() {
    std::vector<int> rows(2, 0), sums(2, 0);
    Pool pool(Teams{{-1, 1, {}}, {-1, 1, {}}});
    pool.each(2, [&](int task, int) { rows[task] = 7; });
    pool.each(2, [&](int task, int) { sums[task] = rows[1 - task]; });
    machine::demand(sums[0] == 7 && sums[1] == 7, "a job sees all that the job before it wrote");
}

}  // namespace

int main(int count, char** arguments) {
    return machine::explore(count, arguments,
                            {{"a pool that does nothing", idle},
                             {"a node of two threads", one_node},
                             {"two nodes, two jobs", two_nodes, 0, true},
                             {"from task to task", from_task_to_task},
                             {"three nodes", three_nodes, 0, true}});
}
