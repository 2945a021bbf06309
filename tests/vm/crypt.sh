# Encrypted volumes against the kernel: dm-crypt opens what Pagemill made and wrote, Pagemill serves what dm-crypt wrote,
# and the kernel's NBD client has a file system on it. Contents are compared whole.
# machine: -smp 2 -m 1536
# modules: dm-mod dm-crypt aesni-intel xts ecb cbc sha256_generic loop nbd ext4 crc32c_generic
# programs: cryptsetup mkfs.ext4 e2fsck nbd-client
# crate: pagemill-cli
set -u
head -c 64 /dev/urandom > key
# Where cryptsetup keeps its locks.
mkdir -p /run/cryptsetup

# has_kernel IMAGE OPTION…: dm-crypt has the plain volume at /dev/mapper/plain.
has_kernel() {
    cryptsetup open --disable-keyring --key-file key "$@" plain
    cryptsetup status plain | grep -E 'cipher|sector size'
}

# serves IMAGE OPTION…: Pagemill serves it, and the kernel has it at /dev/nbd0.
serves() {
    # The client asks for no block size, and the kernel keeps to the one that it is told.
    pagemill crypt serve "$@" --key-file key --unix /tmp/served --block-size-agreed &
    server=$!
    until [ -S /tmp/served ]; do sleep 0.1; done
    nbd-client -unix /tmp/served -b 4096 /dev/nbd0
}
serves_no_more() {
    nbd-client -d /dev/nbd0
    kill -TERM $server
    wait $server
}

same() {
    [ "$1" = "$2" ] || { echo "not the same: $3"; exit 1; }
}
whole() {
    sync
    echo 3 > /proc/sys/vm/drop_caches
    sha256sum < "$1"
}

# A file system that dm-crypt made lives on through Pagemill and the kernel's client, and the other way round.
both_ways() {
    image=$1
    kernel=$2
    pagemill=$3
    has_kernel $image $kernel
    mkfs.ext4 -q -b 4096 /dev/mapper/plain
    mount /dev/mapper/plain /mnt
    head -c 1000000 /dev/urandom > /mnt/from-kernel
    first=$(sha256sum < /mnt/from-kernel)
    umount /mnt
    before=$(whole /dev/mapper/plain)
    cryptsetup close plain

    serves $image $pagemill
    same "$before" "$(whole /dev/nbd0)" "what dm-crypt wrote, as Pagemill serves it"
    mount /dev/nbd0 /mnt
    same "$first" "$(sha256sum < /mnt/from-kernel)" "a file that dm-crypt wrote"
    head -c 1000000 /dev/urandom > /mnt/from-pagemill
    second=$(sha256sum < /mnt/from-pagemill)
    umount /mnt
    after=$(whole /dev/nbd0)
    serves_no_more

    has_kernel $image $kernel
    same "$after" "$(whole /dev/mapper/plain)" "what Pagemill wrote, as dm-crypt reads it"
    e2fsck -fn /dev/mapper/plain
    mount /dev/mapper/plain /mnt
    same "$first" "$(sha256sum < /mnt/from-kernel)" "a file that dm-crypt wrote"
    same "$second" "$(sha256sum < /mnt/from-pagemill)" "a file that Pagemill wrote"
    umount /mnt
    cryptsetup close plain
}

# fails WORD COMMAND…: the command is refused, and says the word.
fails() {
    word=$1
    shift
    if said=$("$@" 2>&1); then
        echo "not refused: $*"
        exit 1
    fi
    echo "$said" | grep -F -e "$word" || { echo "refused in other words: $said"; exit 1; }
}

echo '== a device is one user'"'"'s, and so is the file behind it'
cheap='--kdf pbkdf2 --kdf-iterations 1000 --key-file key'
truncate -s 40M disk.img
device=$(losetup -f)
losetup "$device" disk.img
mkfs.ext4 -q -b 4096 "$device"
fails --force pagemill crypt format "$device" $cheap
mount "$device" /mnt
fails 'in use' pagemill crypt format "$device" --force $cheap
fails 'in use' pagemill crypt format disk.img --force $cheap
fails 'in use' pagemill crypt serve "$device" --type plain --key-file key --unix /tmp/served
umount /mnt
pagemill crypt format "$device" --force $cheap
serves "$device"
fails 'in use' cryptsetup open --disable-keyring --key-file key "$device" plain
fails 'another program is using it' pagemill crypt serve disk.img --key-file key --unix /tmp/other
head -c 32 /dev/urandom > second
pagemill crypt add-key "$device" --new-key-file second $cheap
cryptsetup luksKillSlot --batch-mode --key-file key "$device" 1
serves_no_more
has_kernel "$device"
fails 'in use' pagemill crypt serve "$device" --key-file key --unix /tmp/served
cryptsetup close plain
losetup -d "$device"
rm disk.img second

# The last number is the file's MiB: a LUKS2 header has 16 of them.
for kind in 'luks2 4096 512 24' 'luks2 512 256 24' 'luks1 512 512 10'; do
    set -- $kind
    echo "== Pagemill makes $1, sectors of $2 bytes, keys of $3 bits"
    sectors="--sector-size $2"
    [ "$1" = luks1 ] && sectors=
    pagemill crypt format disk.img --size "$4M" --type "$1" $sectors --key-size "$3" \
        --kdf pbkdf2 --kdf-iterations 1000 --key-file key
    both_ways disk.img '' ''
    rm disk.img

    echo "== cryptsetup makes $1, sectors of $2 bytes, keys of $3 bits"
    truncate -s "$4M" disk.img
    cryptsetup luksFormat --batch-mode --disable-keyring --type "$1" $sectors --key-size "$3" \
        --pbkdf pbkdf2 --pbkdf-force-iterations 1000 --key-file key disk.img
    both_ways disk.img '' ''
    rm disk.img
done
echo '== plain, sectors of 512 bytes, keys of 512 bits'
truncate -s 8M disk.img
both_ways disk.img '--type plain --cipher aes-xts-plain64 --key-size 512' '--type plain --plain-key-size 512'
