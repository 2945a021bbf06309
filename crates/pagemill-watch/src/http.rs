//! As much of HTTP/1.1 as a Prometheus server needs: one GET or HEAD of `/metrics` a connection, without a body.

/// Longer than the request line and the headers of any scraper.
pub(super) const HEAD_MAX: usize = 8192;

/// Finds the end of a request's head, which is an empty line. The first `seen` bytes have none: it is searched from there on, so
/// that a head that comes a byte at a time is not read again for each byte.
pub(super) fn head(bytes: &[u8], seen: usize) -> Option<&[u8]> {
    let from = seen.saturating_sub(3); // The end may have begun.
    let ends = |end: &[u8]| bytes[from..].windows(end.len()).position(|window| window == end);
    let end = ends(b"\r\n\r\n").into_iter().chain(ends(b"\n\n")).min()?;
    Some(&bytes[..from + end])
}

/// Reads the request line. Returns whether the answer is to have a body, as it has unless the method is HEAD.
///
/// # Errors
/// The answer to any other request.
pub(super) fn parse(head: &[u8]) -> Result<bool, Vec<u8>> {
    let line = head.split(|&byte| byte == b'\n').next().unwrap_or_default();
    let line = line.strip_suffix(b"\r").unwrap_or(line);
    let mut words = core::str::from_utf8(line).unwrap_or_default().split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(answer("400 Bad Request", b"ask as GET /metrics HTTP/1.1\n", true));
    };
    if !version.starts_with("HTTP/1.") {
        return Err(answer("505 HTTP Version Not Supported", b"this server speaks HTTP/1.1\n", true));
    }
    if !matches!(method, "GET" | "HEAD") {
        return Err(answer("405 Method Not Allowed\r\nAllow: GET, HEAD", b"ask as GET /metrics\n", true));
    }
    // Proxies send the whole address.
    let whole = target.strip_prefix("http://").map(|rest| rest.find('/').map_or("/", |at| &rest[at..]));
    let has_body = method == "GET";
    match whole.unwrap_or(target).split('?').next() {
        Some("/metrics") => Ok(has_body),
        _ => Err(answer("404 Not Found", b"the figures are at /metrics\n", has_body)),
    }
}

/// The answer to a head that is too long.
pub(super) fn too_long() -> Vec<u8> {
    answer("431 Request Header Fields Too Large", format!("a request has at most {HEAD_MAX} bytes\n").as_bytes(), true)
}

/// An answer, after which the connection is closed. The text is in the format that Prometheus reads.
pub(super) fn answer(status: &str, text: &[u8], has_body: bool) -> Vec<u8> {
    let len = text.len();
    let content = "Content-Type: text/plain; version=0.0.4; charset=utf-8";
    let head = format!("HTTP/1.1 {status}\r\n{content}\r\nContent-Length: {len}\r\nConnection: close\r\n\r\n");
    [head.as_bytes(), if has_body { text } else { b"" }].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_ends_with_an_empty_line() {
        for (whole, expected) in [
            (&b"GET / HTTP/1.1\r\nHost: a\r\n\r\nbody\n\n"[..], &b"GET / HTTP/1.1\r\nHost: a"[..]),
            (b"GET / HTTP/1.0\n\n", b"GET / HTTP/1.0"),
        ] {
            assert_eq!(head(whole, 0), Some(expected));
            // In two pieces.
            for seen in 0..whole.len() {
                let found = head(&whole[..seen], 0).or_else(|| head(whole, seen));
                assert_eq!(found, Some(expected), "{seen} bytes came first");
            }
        }
        for incomplete in [&b""[..], b"\r\n", b"GET / HTTP/1.1\r\nHost: a\r\n", b"GET / HTTP/1.1\r\n\r"] {
            assert_eq!(head(incomplete, 0), None, "{incomplete:?}");
        }
    }

    #[test]
    fn only_get_and_head_of_the_figures_are_served() {
        for (line, has_body) in [
            ("GET /metrics HTTP/1.1", true),
            ("GET /metrics?name=a HTTP/1.0\r", true),
            ("HEAD /metrics HTTP/1.1", false),
            ("GET http://localhost:9100/metrics HTTP/1.1", true),
        ] {
            assert_eq!(parse(line.as_bytes()), Ok(has_body), "{line}");
        }
        for (line, status) in [
            (&b""[..], "400"),
            (b"\xff\xfe", "400"),
            (b"GET /metrics", "400"),
            (b"GET  /metrics HTTP/1.1", "400"),
            (b"GET /metrics HTTP/1.1 more", "400"),
            (b"GET /metrics HTTP/2.0", "505"),
            (b"get /metrics HTTP/1.1", "405"),
            (b"POST /metrics HTTP/1.1", "405"),
            (b"GET / HTTP/1.1", "404"),
            (b"GET /metrics/ HTTP/1.1", "404"),
            (b"GET http://localhost HTTP/1.1", "404"),
            (b"GET /../metrics HTTP/1.1", "404"),
        ] {
            let refused = String::from_utf8(parse(line).unwrap_err()).unwrap();
            assert!(refused.starts_with(&format!("HTTP/1.1 {status} ")), "{line:?}: {refused}");
        }
    }

    #[test]
    fn an_answer_to_head_has_the_length_and_no_body() {
        let text = |has_body| String::from_utf8(answer("200 OK", b"abc\n", has_body)).unwrap();
        assert!(text(true).ends_with("Content-Length: 4\r\nConnection: close\r\n\r\nabc\n"));
        assert!(text(false).ends_with("Content-Length: 4\r\nConnection: close\r\n\r\n"));
    }
}
