# An NVMe drive driven by `pagemill nvme`, past the kernel's driver, behind an emulated IOMMU: what the one wrote the other
# reads, whole. And what goes wrong: each in words, and nothing lost.
# machine: -smp 2 -m 1024
# machine: -device intel-iommu,intremap=on,caching-mode=on
# machine: -device nvme,serial=pagemill,drive=data,max_ioqpairs=8,mdts=10 -device nvme,serial=slow,drive=slow
# kernel: intel_iommu=on
# disks: data=24M slow=8M,throttling.iops-total=2
# modules: vfio-pci vfio_iommu_type1 nvme ext4 crc32c_generic
# programs: cmp mkfs.ext4
# crate: pagemill-cli
set -u
drive=0000:00:02.0
slow=0000:00:03.0

fails() { echo "vm: $*"; exit 1; }
# said WORDS COMMAND…: it fails, and says these words.
said() {
    words=$1
    shift
    if "$@" > said.txt 2>&1; then fails "this did not fail: $*"; fi
    cat said.txt
    grep -qF -- "$words" said.txt || fails "it did not say '$words': $*"
    [ "$(wc -l < said.txt)" = 1 ] || fails "that is not one line: $*"
}
kernels() {
    pagemill nvme unbind $drive
    until [ -b /dev/nvme0n1 ]; do sleep 0.1; done
}
ours() { pagemill nvme bind $drive; }
random() { dd if=/dev/urandom of="$1" bs=1M count=24 2> /dev/null; }

echo '== what is in use, or no drive, is left alone'
said 'bind it first' pagemill nvme identify $drive
said 'is no NVMe controller' pagemill nvme bind 0000:00:1f.0
said 'there is no PCI device' pagemill nvme bind 0000:00:1e.0
mkfs.ext4 -q /dev/nvme0n1
mount /dev/nvme0n1 /mnt
said '/dev/nvme0n1 is mounted on /mnt; unmount it' pagemill nvme bind $drive
umount /mnt
mkswap /dev/nvme0n1 > /dev/null
swapon /dev/nvme0n1
said '/dev/nvme0n1 is swap space' pagemill nvme bind $drive
swapoff /dev/nvme0n1
[ -b /dev/nvme0n1 ] || fails 'the drive was taken though it was in use'

echo '== what the kernel wrote, Pagemill reads'
random written
dd if=written of=/dev/nvme0n1 bs=1M conv=fsync 2> /dev/null
ours
pagemill nvme identify $drive
for how in '--queues 1' '--queues 1 --poll' '--queues 4' '--queues 4 --poll'; do
    pagemill nvme read $drive --bytes 24M --random 7 $how --to read --force
    cmp written read || fails "read otherwise than written: $how"
done
pagemill nvme read $drive --bytes 24M --to - | cmp - written
pagemill nvme read $drive --lba 12345 --blocks 7 --to - > seven
dd if=written bs=512 skip=12345 count=7 2> /dev/null | cmp - seven

echo '== what Pagemill wrote, the kernel reads'
for how in '--queues 1' '--queues 1 --poll' '--queues 4' '--queues 4 --poll'; do
    random written
    pagemill nvme write $drive --random 8 $how --from written
    kernels
    cmp written /dev/nvme0n1 || fails "written otherwise than meant: $how"
    ours
done
