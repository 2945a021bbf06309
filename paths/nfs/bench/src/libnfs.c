/* The client of `pagemill bench rpc` that is libnfs: reads or writes a file in pieces of 1 MiB, several at a time.
 *
 * libnfs-client URL DEPTH PIECES: for each line `read COUNT` or `write COUNT` it says how many nanoseconds that took, a COMMIT
 * with the writes, or `failed: ` and why, at which it ends. It reads the file `read`, and writes `written`. */
#include <fcntl.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include <nfsc/libnfs.h>
#ifdef LIBNFS_API_V2
#error "it is written for libnfs 4 and 5"
#endif

enum { PIECE = 1 << 20 };

static struct nfs_context *nfs;
static struct nfsfh *file;
static int writes;
static long pieces, count, sent, answered;
static char data[PIECE];

static void failed(const char *what, const char *why)
{
	printf("failed: %s: %s\n", what, why ? why : "no reason given");
	exit(1);
}

static void next_piece(void);

static void on_answer(int status, struct nfs_context *context, void *answer, void *unused)
{
	(void)context;
	(void)unused;
	if (status != PIECE)
		failed(writes ? "write" : "read", status < 0 ? answer : "it is short");
	answered++;
	next_piece();
}

static void next_piece(void)
{
	uint64_t offset = (uint64_t)(sent % pieces) * PIECE;
	int refused;

	if (sent == count)
		return;
	sent++;
	if (writes)
		refused = nfs_pwrite_async(nfs, file, offset, PIECE, data, on_answer, NULL);
	else
		refused = nfs_pread_async(nfs, file, offset, PIECE, on_answer, NULL);
	if (refused)
		failed("a request", nfs_get_error(nfs));
}

int main(int argc, char **argv)
{
	struct nfs_url *url;
	struct nfsfh *readable, *writable;
	struct timespec start, end;
	char what[8];
	int depth;

	setvbuf(stdout, NULL, _IOLBF, 0);
	if (argc != 4 || (nfs = nfs_init_context()) == NULL)
		failed("libnfs", "its arguments, or no memory");
	depth = atoi(argv[2]);
	pieces = atol(argv[3]);
	memset(data, 0x5a, sizeof data);
	if ((url = nfs_parse_url_dir(nfs, argv[1])) == NULL || nfs_mount(nfs, url->server, url->path) != 0)
		failed("mount", nfs_get_error(nfs));
	if (nfs_open(nfs, "/read", O_RDONLY, &readable) != 0 || nfs_open(nfs, "/written", O_WRONLY, &writable) != 0)
		failed("open", nfs_get_error(nfs));
	while (scanf("%7s %ld", what, &count) == 2) {
		writes = what[0] == 'w';
		file = writes ? writable : readable;
		sent = answered = 0;
		clock_gettime(CLOCK_MONOTONIC, &start);
		for (int i = 0; i < depth; i++)
			next_piece();
		while (answered < count) {
			struct pollfd socket = { .fd = nfs_get_fd(nfs), .events = nfs_which_events(nfs) };

			if (poll(&socket, 1, -1) < 0 || nfs_service(nfs, socket.revents) != 0)
				failed("the connection", nfs_get_error(nfs));
		}
		if (writes && nfs_fsync(nfs, file) != 0)
			failed("commit", nfs_get_error(nfs));
		clock_gettime(CLOCK_MONOTONIC, &end);
		printf("%lld\n", (end.tv_sec - start.tv_sec) * 1000000000LL + end.tv_nsec - start.tv_nsec);
	}
	return 0;
}
