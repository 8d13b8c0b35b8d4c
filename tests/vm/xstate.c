/*
 * A wrapper of ptrace(2) for User-mode Linux, loaded with LD_PRELOAD by tests/vm/run.
 *
 * The kernel of Debian 12 sets the extended registers of a guest's process (NT_X86_XSTATE) from
 * 2696 bytes: all up to the protection keys. The host's kernel takes nothing but the state of its
 * own CPU as a whole (xstateregs_set), which is larger on a CPU with AMX: EFAULT, and the guest
 * panics with "ptrace set fp regs failed" when it starts init. The wrapper then completes the
 * registers with those that the process has.
 */
#include <elf.h>
#include <errno.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

/* Bytes of the largest state of a CPU today: 11 KiB with AMX. */
#define WHOLE (64 << 10)

/* Offset of XSTATE_BV, the bit map of the features that a state has. */
#define FEATURES 512

/* The features up to the protection keys (bit 9). */
#define GIVEN_FEATURES 0x3ff

static long call(long request, long pid, long address, void *data)
{
    return syscall(SYS_ptrace, request, pid, address, data);
}

static long set_registers(long pid, const struct iovec *given)
{
    /* Static, because the stack of this kernel is small; it has one CPU, and no other thread. */
    static unsigned char whole[WHOLE];
    struct iovec registers = {whole, sizeof(whole)};
    uint64_t features;

    if (call(PTRACE_GETREGSET, pid, NT_X86_XSTATE, &registers) < 0)
        return -1;
    if (given->iov_len > registers.iov_len || given->iov_len < FEATURES + sizeof(features)) {
        errno = EFAULT;
        return -1;
    }
    memcpy(whole, given->iov_base, given->iov_len);
    memcpy(&features, whole + FEATURES, sizeof(features));
    features &= GIVEN_FEATURES;
    memcpy(whole + FEATURES, &features, sizeof(features));
    return call(PTRACE_SETREGSET, pid, NT_X86_XSTATE, &registers);
}

long ptrace(enum __ptrace_request request, ...)
{
    int peeks = request == PTRACE_PEEKTEXT || request == PTRACE_PEEKDATA ||
                request == PTRACE_PEEKUSER;
    va_list arguments;
    long pid, address, result, word;
    void *data;

    va_start(arguments, request);
    pid = va_arg(arguments, pid_t);
    address = (long)va_arg(arguments, void *);
    data = va_arg(arguments, void *);
    va_end(arguments);
    /* As glibc's, which returns the word that the system call writes. */
    result = call(request, pid, address, peeks ? &word : data);
    if (peeks && result >= 0) {
        errno = 0;
        return word;
    }
    if (result < 0 && errno == EFAULT && request == PTRACE_SETREGSET && address == NT_X86_XSTATE)
        return set_registers(pid, data);
    return result;
}
