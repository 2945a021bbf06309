//! Answers to ARP and ping, on the packet's own page (RFC 826, RFC 792; tags: IEEE 802.1Q).
use std::net::Ipv4Addr;

use smoltcp::wire::{
    ArpOperation, ArpPacket, EthernetAddress, EthernetFrame, EthernetProtocol, Icmpv4Message, Icmpv4Packet, IpProtocol,
    Ipv4Packet,
};

use crate::counts::Dropped;
use crate::interface::Mac;

/// The types of tags, and their length in bytes.
const TAGS: [EthernetProtocol; 2] = [EthernetProtocol::Unknown(0x8100), EthernetProtocol::Unknown(0x88a8)];
const TAG: usize = 4;
const HEADER: usize = 14;

/// Who answers.
pub(crate) struct Echo {
    pub(crate) mac: Mac,
    pub(crate) addresses: Vec<Ipv4Addr>,
}

impl Echo {
    /// Makes the packet its own answer. Tags stay as they are.
    pub(crate) fn answer(&self, packet: &mut [u8]) -> Result<(), Dropped> {
        let us = EthernetAddress(self.mac.0);
        let header = EthernetFrame::new_checked(&*packet).map_err(|_| Dropped::Damaged)?;
        let (from, to) = (header.src_addr(), header.dst_addr());
        if !from.is_unicast() || (to != us && !to.is_broadcast()) {
            return Err(Dropped::NotAsked);
        }
        let (mut kind, mut at) = (header.ethertype(), HEADER);
        for _ in 0..2 {
            if TAGS.contains(&kind) {
                let inner = packet.get(at + 2..at + TAG).ok_or(Dropped::Damaged)?;
                (kind, at) = (u16::from_be_bytes([inner[0], inner[1]]).into(), at + TAG);
            }
        }
        match kind {
            EthernetProtocol::Arp => self.answer_arp(&mut packet[at..])?,
            // A ping that asks everybody is not answered.
            EthernetProtocol::Ipv4 if to == us => self.answer_ping(&mut packet[at..])?,
            _ => return Err(Dropped::NotAsked),
        }
        let mut header = EthernetFrame::new_unchecked(packet);
        header.set_src_addr(us);
        header.set_dst_addr(from);
        Ok(())
    }

    fn is_ours(&self, address: Ipv4Addr) -> bool {
        self.addresses.contains(&address)
    }

    fn answer_arp(&self, packet: &mut [u8]) -> Result<(), Dropped> {
        let mut arp = ArpPacket::new_checked(packet).map_err(|_| Dropped::Damaged)?;
        let is_for_ethernet = arp.hardware_len() == 6 && arp.protocol_len() == 4;
        let kind = (u16::from(arp.hardware_type()), arp.protocol_type());
        if !is_for_ethernet || kind != (1, EthernetProtocol::Ipv4) || arp.operation() != ArpOperation::Request {
            return Err(Dropped::NotAsked);
        }
        let asked: [u8; 4] = arp.target_protocol_addr().try_into().map_err(|_| Dropped::Damaged)?;
        if !self.is_ours(asked.into()) {
            return Err(Dropped::NotAsked);
        }
        let (mut mac, mut address) = ([0; 6], [0; 4]);
        mac.copy_from_slice(arp.source_hardware_addr());
        address.copy_from_slice(arp.source_protocol_addr());
        arp.set_operation(ArpOperation::Reply);
        arp.set_target_hardware_addr(&mac);
        arp.set_target_protocol_addr(&address);
        arp.set_source_hardware_addr(&self.mac.0);
        arp.set_source_protocol_addr(&asked);
        Ok(())
    }

    fn answer_ping(&self, packet: &mut [u8]) -> Result<(), Dropped> {
        let mut ip = Ipv4Packet::new_checked(packet).map_err(|_| Dropped::Damaged)?;
        if ip.version() != 4 || ip.header_len() < 20 || !ip.verify_checksum() {
            return Err(Dropped::Damaged);
        }
        let (from, to) = (ip.src_addr(), ip.dst_addr());
        let is_part = ip.more_frags() || ip.frag_offset() != 0;
        let is_from_one = !from.is_multicast() && !from.is_broadcast() && !from.is_unspecified();
        if ip.next_header() != IpProtocol::Icmp || is_part || !is_from_one || !self.is_ours(to) {
            return Err(Dropped::NotAsked);
        }
        let mut icmp = Icmpv4Packet::new_checked(ip.payload_mut()).map_err(|_| Dropped::Damaged)?;
        if (icmp.msg_type(), icmp.msg_code()) != (Icmpv4Message::EchoRequest, 0) {
            return Err(Dropped::NotAsked);
        }
        if !icmp.verify_checksum() {
            return Err(Dropped::Damaged);
        }
        icmp.set_msg_type(Icmpv4Message::EchoReply);
        icmp.fill_checksum();
        ip.set_src_addr(to);
        ip.set_dst_addr(from);
        ip.set_hop_limit(64);
        ip.fill_checksum();
        Ok(())
    }
}
