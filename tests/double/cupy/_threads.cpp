// The threads of one block: each has a stack of its own, and runs up to its next barrier before the
// next thread does.
#include <sys/mman.h>
#include <ucontext.h>

namespace {

constexpr unsigned int most_threads = 1024;
constexpr size_t stack_nbytes = 64 << 10;

ucontext_t scheduler, contexts[most_threads];
bool ended[most_threads];
char *stacks;
unsigned int current;
bool plain, diverged;
void (*run)(void *, unsigned int);
void *argument;

void enter() {
    run(argument, current);
    ended[current] = true;  // uc_link: the scheduler goes on
}

void prepare(unsigned int thread) {
    ended[thread] = false;
    getcontext(&contexts[thread]);
    contexts[thread].uc_stack.ss_sp = stacks + thread * stack_nbytes;
    contexts[thread].uc_stack.ss_size = stack_nbytes;
    contexts[thread].uc_link = &scheduler;
    makecontext(&contexts[thread], enter, 0);
}

}  // namespace

extern "C" void double_barrier() {
    if (plain)
        diverged = true;
    else
        swapcontext(&contexts[current], &scheduler);
}

// 1: some threads ended while others were at a barrier.
extern "C" int double_run_block(void (*each)(void *, unsigned int), void *with,
                                unsigned int threads, int backwards) {
    run = each;
    argument = with;
    plain = diverged = false;
    if (!stacks)
        stacks = static_cast<char *>(mmap(nullptr, most_threads * stack_nbytes,
                                          PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1,
                                          0));
    for (bool first_round = true;; first_round = false) {
        unsigned int at_barrier = 0;
        for (unsigned int i = 0; i < threads; ++i) {
            current = backwards ? threads - 1 - i : i;
            if (plain) {
                run(argument, current);
                continue;
            }
            if (first_round) prepare(current);
            swapcontext(&scheduler, &contexts[current]);
            at_barrier += !ended[current];
            // Most kernels have no barrier: then the other threads need no stacks.
            plain = first_round && i == 0 && at_barrier == 0;
        }
        if (diverged) return 1;
        if (at_barrier == 0) return 0;
        if (at_barrier < threads) return 1;
    }
}
