// Runs a program of threads in every order that C++'s memory model allows, and checks each.
//
// What is explored is the code itself, unmodified: it is compiled with -fsanitize=thread, so that the compiler calls a
// function at each atomic operation, with its memory order, and at each access to plain memory. machine.cpp defines these
// functions, and those of threads, mutexes and condition variables, in place of the sanitizer's library; runtime/futex.h
// here stands before the real one in the include path.
//
// Model. An execution is a graph: the operations of each thread, the store that each load reads from, and the order of
// the stores to each location (RC11 without fences). A load may read any store that is not older than one it must know:
// by happens-before, by what its thread has read, or, if both are sequentially consistent, by their single order. A
// store may be put before stores of others that its thread does not know. Release, acquire and release sequences carry
// what a thread knows. What is not modelled: a load that reads a store of the future (load buffering), as in GenMC.
// Waiting and waking by futex carries nothing but the word's own order.
//
// Search. Depth first, with partial-order reduction: an operation is tried in another order only against one of another
// thread that it does not commute with (Flanagan and Godefroid, with sleep sets). A load that was tried is tried again
// only with stores that are new since.
//
// An execution fails if a demand does not hold, if plain memory is accessed by two threads without happens-before or
// after it was freed, if all threads wait for ever, if an exception ends it, or if it does not end.
#pragma once

#include <initializer_list>

namespace machine {

struct Scenario {
    const char* name;
    void (*body)();      // run by the first thread; owns all that it shares with others
    int timeouts = 0;    // how many timed waits may end early; without any a timed wait is one without end
    bool large = false;  // explored only when asked for
};

// Ends the execution as failed unless `holds`.
void demand(bool holds, const char* rule);
// A number from 0 to ways - 1; all are tried.
int choose(int ways);
// Goes on when all other threads sleep or have ended: what follows is explored apart from what was before.
void settle();
// Records that an execution ended so; printed with their counts.
void outcome(int number);

// Explores the scenarios and prints a line for each; returns 1 if an execution failed. Arguments: --most N: at most N
// executions of a scenario. --only NAME. --large: also the large scenarios. --naive: without reduction. --sites: prints
// where the program synchronises, as addresses. --weaken ADDRESS: instead, weakens the memory order there in each way
// that there is, or leaves the lock or the wake-up there out, and prints which scenario finds that out.
int explore(int count, char** arguments, std::initializer_list<Scenario> scenarios);

// Whether the scenario ends in the same ways with and without reduction, each of them found.
bool reduction_is_right(const Scenario& scenario);

// For runtime/futex.h.
void futex_wait(void* word, unsigned seen, const void* limit);
void futex_wake(void* word);

}  // namespace machine
