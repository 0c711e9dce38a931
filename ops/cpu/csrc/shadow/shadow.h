// Shadow experts: those that are not resident are computed by a second pool, from blocks of the shadow store, while the
// main pool ("the device") computes the resident ones. On the tape a layer's mixture is Submit, MoeRows, Join.
//
// Who touches what. Tables of addresses, `ids`, counters and the step number are read and written by the device's thread
// only: Submit sorts the pairs there before it hands over, so the shadow pool never looks at a table that changes between
// replays. The shadow pool reads x, the sorted pairs and the store (written once, before the first step), and writes its
// pairs' rows and scratch memory of its own. The device writes the other pairs' rows. The store's table never changes.
//
// Ordering. `submit` writes the work and publishes it by an increment of `submitted`; the coordinator, thread 0 of the
// shadow pool, sees it by an acquire load. It reports by a store of `done` and a release increment of `news`; `wait`
// returns after an acquire load that sees it, so Join sees the rows and all that was written before. An increment without
// a work is the stop, behind which `submit` publishes nothing: what was handed over is done. One work is in
// flight at most: Submit waits for one that an interrupted step left behind, before it writes anything that one reads.
// So tables may be written whenever no op runs, between two replays: whoever reads them is the thread that writes them.
//
// Never a hang. Waiting has a deadline, after which it throws; a pool that was stopped throws at once. What a work in
// flight may touch is owned by the work (`keep`), and a pool that does not end in time is abandoned: its thread is
// detached and everything it may touch is never freed.
//
// Nothing is allocated in a step: works are made at capture and handed over by reference.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "kernels/ops.h"
#include "shadow/job.h"

namespace umbra {

struct ShadowError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// The shadow's part of one layer's mixture; for jobs of a bridge see worker.h.
struct ShadowWork {
    MoeRows rows;  // those that are not resident: `elsewhere` is the device's table
    int64_t layer;
    const int64_t* step;           // its number, for errors
    std::shared_ptr<void> keep;    // what owns the memory
    bool pending = false;          // handed over and not yet waited for
    int64_t began = 0, ended = 0;  // when the pool was at it: nanoseconds of the steady clock

    ShadowWork(const MoeRows& rows, int64_t layer, const int64_t* step, std::shared_ptr<void> keep)
        : rows(rows), layer(layer), step(step), keep(std::move(keep)) {}
    virtual ~ShadowWork() = default;
    virtual void compute(Context& context) { rows.compute(context); }
    virtual Job* finished() { return nullptr; }  // whom to tell of it, once the next work may come

    ShadowError error(const std::string& what) const;
};

class ShadowPool {
public:
    // `timeout`: seconds that a wait, and the end of the pool, may take.
    ShadowPool(const std::vector<Team>& teams, const Kernels& kernels, double timeout);
    ~ShadowPool();
    ShadowPool(const ShadowPool&) = delete;
    ShadowPool& operator=(const ShadowPool&) = delete;

    // By one thread at a time. `submit` returns at once, false: the pool was stopped; `wait`: until what was submitted, if
    // anything, is done; `idle`: whether it is.
    bool submit(const std::shared_ptr<ShadowWork>& work);
    void wait();
    bool idle() const;

    // Ends the pool after the work that it has, if any. By any thread.
    void stop();

    // Where each team's part of `count` things begins; the end of the last one too.
    std::vector<int> split(int count) const;

private:
    struct State;
    std::unique_ptr<State> state_;
    std::vector<Team> teams_;
    std::thread coordinator_;
};

// Counts the routing and hands the layer's work over, if there is any.
struct Submit {
    std::shared_ptr<ShadowPool> pool;
    std::shared_ptr<ShadowWork> work;
    int64_t* counts;  // (experts) += 1 for each pair
    void run(Context&) const;
};

// Waits for what Submit handed over and adds up all rows.
struct Join {
    std::shared_ptr<ShadowPool> pool;
    std::shared_ptr<ShadowWork> work;
    AddRows sum;
    int64_t* times;  // when the pool began and ended, when Join came to wait and went on, in nanoseconds; 0: not needed
    void run(Context&) const;
};

}  // namespace umbra
