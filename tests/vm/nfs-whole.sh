# More of nfs, and what programmers do: git clones a repository into the mount, and a compiler builds a program there. tcc,
# because gcc with its headers would be larger than all the rest of the machine. And stress-ng's stressors of files; but not
# - copy-file and dirmany, which want 128 MiB and a time
# - flock, lockf and other locks, which the client keeps to itself without a lock manager; xattr, which NFSv3 does not have
# - readahead, which removes a folder while it has a file open that was in it: the client keeps that file there, renamed.
# tier: long
# minutes: 60
# machine: -smp 2 -m 2048
# modules: virtio_pci virtio_net nfs nfsv3
# programs: fsx pjdfstest dbench fio stress-ng cmp git tcc make
# files: nfs-checks nfs-pjdfstest.toml
# host: nfs --no-root-squash --insecure --cache 32M --json
. /etc/nfs-checks
ready
mounted
for seed in 1 2 3 4; do attempt fsx-$seed exercise 5000 $seed; done
attempt pjdfstest posix
attempt dbench many 100 60
attempt fio-buffered verified 64M 0
attempt fio-direct verified 16M 1
attempt names names 10000
attempt git repository 300
attempt compiler built 100
for stressor in access aio chmod chown dentry filename fsize fstat handle mknod open rename seek sendfile touch utime; do
    attempt stress-$stressor stressed $stressor 200
done
attempt stress-chdir stressed chdir 100 --chdir-dirs 256
attempt stress-dir stressed dir 4 --dir-dirs 256
attempt stress-dirdeep stressed dirdeep 100 --dirdeep-inodes 1000
attempt stress-hdd stressed hdd 200 --hdd-bytes 8m
attempt stress-iomix stressed iomix 200 --iomix-bytes 8m
attempt stress-link stressed link 1
attempt stress-msync stressed msync 200 --msync-bytes 2m
attempt stress-revio stressed revio 200 --revio-bytes 8m
attempt stress-symlink stressed symlink 1
attempt stress-sync-file stressed sync-file 10 --sync-file-bytes 2m
attempt counters counters again
attempt restarted restarted 10
umount /mnt
# Small transfers, each synchronous, and nothing of the attributes cached: other calls of the client.
mounted rsize=8192,wsize=8192,sync,noac
attempt fsx-small exercise 2000 5
attempt fio-small verified 1M 0
attempt names-small names 500
umount /mnt
attempt counters-at-the-end counters
# Too little memory, over one connection and over four.
for connections in 1 4; do
    host start "$short"
    mounted nconnect=$connections
    attempt starved-$connections starved 40
    attempt ended-while-starved-$connections ended_while_starved 20
    host stop short
    umount /mnt
done
