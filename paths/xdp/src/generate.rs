//! Packets that are made here: UDP over IPv4 (RFC 768), numbered.
use std::net::Ipv4Addr;

use smoltcp::phy::ChecksumCapabilities;
use smoltcp::wire::{
    ETHERNET_HEADER_LEN, EthernetAddress, EthernetFrame, EthernetProtocol, EthernetRepr, IPV4_HEADER_LEN, IpProtocol,
    Ipv4Packet, Ipv4Repr, UDP_HEADER_LEN, UdpPacket,
};

use crate::interface::Mac;

/// The bytes before the number, which has 8.
const HEADERS: usize = ETHERNET_HEADER_LEN + IPV4_HEADER_LEN + UDP_HEADER_LEN;
/// The discard service (RFC 863).
const DISCARD: u16 = 9;

/// From whom to whom.
#[derive(Clone, Copy, Debug)]
pub struct Ends {
    /// Ethernet addresses.
    pub macs: [Mac; 2],
    /// IPv4 addresses.
    pub addresses: [Ipv4Addr; 2],
}

/// A packet of `size` bytes, which is at least 60. Its number is 0.
#[must_use]
pub fn packet(ends: &Ends, size: usize) -> Vec<u8> {
    let size = size.max(60);
    let mut bytes = vec![0; size];
    let [from, to] = ends.macs.map(|mac| EthernetAddress(mac.0));
    EthernetRepr { src_addr: from, dst_addr: to, ethertype: EthernetProtocol::Ipv4 }
        .emit(&mut EthernetFrame::new_unchecked(&mut bytes[..]));
    let [from, to] = ends.addresses;
    let payload = size - ETHERNET_HEADER_LEN - IPV4_HEADER_LEN;
    let ip =
        Ipv4Repr { src_addr: from, dst_addr: to, next_header: IpProtocol::Udp, payload_len: payload, hop_limit: 64 };
    ip.emit(&mut Ipv4Packet::new_unchecked(&mut bytes[ETHERNET_HEADER_LEN..]), &ChecksumCapabilities::default());
    let mut udp = UdpPacket::new_unchecked(&mut bytes[ETHERNET_HEADER_LEN + IPV4_HEADER_LEN..]);
    udp.set_src_port(DISCARD);
    udp.set_dst_port(DISCARD);
    udp.set_len(payload as u16);
    // 0: none, since each packet has another number.
    udp.set_checksum(0);
    bytes
}

/// Copies a packet and gives it its number.
#[inline]
pub(crate) fn write(to: &mut [u8], packet: &[u8], number: u64) {
    to.copy_from_slice(packet);
    to[HEADERS..HEADERS + 8].copy_from_slice(&number.to_be_bytes());
}
