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

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use smoltcp::wire::EthernetRepr;

    const US: Mac = Mac([2, 0, 0, 0, 0, 7]);
    const THEM: EthernetAddress = EthernetAddress([2, 0, 0, 0, 0, 1]);
    const OUR_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 7);
    const THEIR_ADDRESS: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);

    fn echo() -> Echo {
        Echo { mac: US, addresses: vec![Ipv4Addr::new(192, 0, 2, 6), OUR_ADDRESS] }
    }

    /// A frame to us, with tags.
    fn frame(tags: &[u16], kind: u16, to: EthernetAddress, payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; HEADER];
        EthernetRepr { src_addr: THEM, dst_addr: to, ethertype: kind.into() }
            .emit(&mut EthernetFrame::new_unchecked(&mut bytes[..]));
        bytes.truncate(HEADER - 2);
        for tag in tags {
            bytes.extend([0x81, 0].into_iter().chain(tag.to_be_bytes()));
        }
        bytes.extend(kind.to_be_bytes());
        bytes.extend(payload);
        bytes
    }

    fn ping(payload: &[u8]) -> Vec<u8> {
        let mut bytes = vec![0; 28 + payload.len()];
        let mut ip = Ipv4Packet::new_unchecked(&mut bytes[..]);
        ip.set_version(4);
        ip.set_header_len(20);
        ip.set_total_len(28 + payload.len() as u16);
        ip.set_hop_limit(3);
        ip.set_next_header(IpProtocol::Icmp);
        ip.set_src_addr(THEIR_ADDRESS);
        ip.set_dst_addr(OUR_ADDRESS);
        ip.fill_checksum();
        let mut icmp = Icmpv4Packet::new_unchecked(ip.payload_mut());
        icmp.set_msg_type(Icmpv4Message::EchoRequest);
        icmp.set_echo_ident(5);
        icmp.set_echo_seq_no(6);
        icmp.data_mut().copy_from_slice(payload);
        icmp.fill_checksum();
        bytes
    }

    fn arp() -> Vec<u8> {
        let head = [0, 1, 8, 0, 6, 4, 0, 1];
        [&head[..], &THEM.0, &THEIR_ADDRESS.octets(), &[0; 6], &OUR_ADDRESS.octets()].concat()
    }

    #[test]
    fn a_ping_becomes_its_answer_with_its_tags_and_its_padding() {
        for tags in [&[][..], &[7], &[7, 9]] {
            for data in [&b""[..], b"odd", b"even"] {
                let mut bytes = frame(tags, 0x800, EthernetAddress(US.0), &ping(data));
                bytes.extend([0xaa; 3]);
                let asked = bytes.clone();
                echo().answer(&mut bytes).unwrap();
                let ip = HEADER + TAG * tags.len();
                assert_eq!(bytes[..6], THEM.0);
                assert_eq!(bytes[6..12], US.0);
                assert_eq!((&bytes[12..ip], bytes.len()), (&asked[12..ip], asked.len()));
                let header = Ipv4Packet::new_checked(&bytes[ip..]).unwrap();
                assert!(header.verify_checksum());
                assert_eq!((header.src_addr(), header.dst_addr()), (OUR_ADDRESS, THEIR_ADDRESS));
                let icmp = Icmpv4Packet::new_checked(header.payload()).unwrap();
                assert!(icmp.verify_checksum());
                assert_eq!((icmp.msg_type(), icmp.echo_ident(), icmp.echo_seq_no()), (Icmpv4Message::EchoReply, 5, 6));
                assert_eq!(icmp.data(), data);
            }
        }
    }

    #[test]
    fn other_packets_are_not_answered() {
        let (us, all) = (EthernetAddress(US.0), EthernetAddress::BROADCAST);
        let with = |mut payload: Vec<u8>, at: usize, byte: u8| {
            payload[at] = byte;
            payload
        };
        let again = |mut payload: Vec<u8>, at: usize, byte: u8| {
            payload[at] = byte;
            Ipv4Packet::new_unchecked(&mut payload[..]).fill_checksum();
            payload
        };
        let cases = [
            ("another Ethernet address", frame(&[], 0x800, THEM, &ping(b"")), Dropped::NotAsked),
            ("a ping to everybody", frame(&[], 0x800, all, &ping(b"")), Dropped::NotAsked),
            ("another address", frame(&[], 0x800, us, &again(ping(b""), 19, 9)), Dropped::NotAsked),
            ("from everybody", frame(&[], 0x800, us, &again(ping(b""), 12, 224)), Dropped::NotAsked),
            ("a part of a packet", frame(&[], 0x800, us, &again(ping(b""), 6, 0x20)), Dropped::NotAsked),
            ("no ICMP", frame(&[], 0x800, us, &again(ping(b""), 9, 17)), Dropped::NotAsked),
            ("an answer", frame(&[], 0x800, us, &with(ping(b""), 20, 0)), Dropped::NotAsked),
            ("a wrong checksum", frame(&[], 0x800, us, &with(ping(b"x"), 28, b'y')), Dropped::Damaged),
            ("a wrong header", frame(&[], 0x800, us, &with(ping(b""), 8, 9)), Dropped::Damaged),
            ("IPv6", frame(&[], 0x86dd, us, &[0; 60]), Dropped::NotAsked),
            ("ARP for another", frame(&[], 0x806, all, &with(arp(), 27, 9)), Dropped::NotAsked),
            ("an ARP answer", frame(&[], 0x806, us, &with(arp(), 7, 2)), Dropped::NotAsked),
            ("three tags", frame(&[1, 2, 3], 0x806, all, &arp()), Dropped::NotAsked),
        ];
        for (what, bytes, why) in cases {
            let mut answered = bytes.clone();
            assert_eq!(echo().answer(&mut answered), Err(why), "{what}");
        }
        assert_eq!(echo().answer(&mut frame(&[], 0x806, all, &arp())), Ok(()));
    }

    #[test]
    fn a_packet_that_ends_too_early_is_not_answered() {
        for whole in [
            frame(&[7], 0x800, EthernetAddress(US.0), &ping(b"data")),
            frame(&[], 0x806, EthernetAddress(US.0), &arp()),
        ] {
            for len in 0..whole.len() {
                assert!(echo().answer(&mut whole[..len].to_vec()).is_err(), "{len}");
            }
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_answered_or_not(kind in 0..3_usize, rest in proptest::collection::vec(any::<u8>(), 0..200)) {
            let kind = [0x800, 0x806, 0x8100][kind];
            let _ = echo().answer(&mut frame(&[], kind, EthernetAddress(US.0), &rest));
            let _ = echo().answer(&mut rest.clone());
        }
    }
}
