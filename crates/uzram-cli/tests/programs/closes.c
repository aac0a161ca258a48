/*
 * Executes itself while a file is open that takes long to close: on a FUSE file system, which a child serves.
 * Nothing of it stays behind, however it ends: the mount is this program's alone, and the child ends with it.
 */
#define _GNU_SOURCE
#include "check.h"
#include <fcntl.h>
#include <linux/fuse.h>
#include <sched.h>
#include <signal.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

static void serve(int fuse) {
    static union {
        struct fuse_in_header header;
        char bytes[1 << 16];
    } in;
    while (read(fuse, &in, sizeof in) > 0) {
        struct {
            struct fuse_out_header header;
            union {
                struct fuse_init_out init;
                struct fuse_entry_out entry;
                struct fuse_attr_out attr;
                struct fuse_open_out open;
            };
        } out = {.header = {.unique = in.header.unique}};
        size_t bytes = 0;
        struct fuse_attr attr = {.ino = 2, .nlink = 1, .mode = S_IFREG | 0444};
        switch (in.header.opcode) {
        case FUSE_INIT:
            out.init = (struct fuse_init_out){.major = 7, .minor = 31, .max_write = PAGE};
            bytes = sizeof out.init;
            break;
        case FUSE_LOOKUP:
            out.entry = (struct fuse_entry_out){.nodeid = 2, .attr = attr};
            bytes = sizeof out.entry;
            break;
        case FUSE_GETATTR:
            out.attr.attr = attr;
            if (in.header.nodeid == 1)
                out.attr.attr.mode = S_IFDIR | 0755;
            bytes = sizeof out.attr;
            break;
        case FUSE_OPEN:
            bytes = sizeof out.open;
            break;
        case FUSE_FLUSH:
            usleep(300000);
            break;
        case FUSE_RELEASE:
            break;
        case FUSE_FORGET:
            continue;
        default:
            out.header.error = -38;
        }
        out.header.len = sizeof out.header + bytes;
        check(write(fuse, &out, out.header.len) == out.header.len);
    }
    exit(0);
}

int main(int count, char **arguments) {
    if (count > 1) {
        check(umount2(arguments[1], MNT_DETACH) == 0 && rmdir(arguments[1]) == 0);
        return puts("right") < 0;
    }
    char dir[] = "/tmp/uzram-closes-XXXXXX", options[80], path[64];
    check(mkdtemp(dir));
    int fuse = open("/dev/fuse", O_RDWR | O_CLOEXEC);
    check(unshare(CLONE_NEWNS) == 0 && mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) == 0);
    snprintf(options, sizeof options, "fd=%d,rootmode=40000,user_id=0,group_id=0", fuse);
    check(fuse >= 0 && mount("closes", dir, "fuse", 0, options) == 0);
    fflush(stdout);
    if (fork() == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        serve(fuse);
    }
    close(fuse);
    snprintf(path, sizeof path, "%s/file", dir);
    check(open(path, O_RDONLY | O_CLOEXEC) >= 0);
    execl("/proc/self/exe", "closes", dir, NULL);
    return 1;
}
