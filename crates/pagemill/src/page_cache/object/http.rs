//! A server of one object over HTTP, which fails as a test tells it to, and a store that asks it.
//!
//! The clients of the crate `object_store` bring TLS, which needs C. This one has no TLS, no pool of connections and no repeats.
use async_trait::async_trait;
use bytes::Bytes;
use core::pin::Pin;
use core::task::{Context, Poll};
use futures_core::Stream;
use object_store::path::Path;
use object_store::{
    CopyOptions, Error, GetOptions, GetRange, GetResult, GetResultPayload, ListResult, MultipartUpload, ObjectMeta,
    ObjectStore, PutMultipartOptions, PutOptions, PutPayload, PutResult, Result,
};
use std::collections::VecDeque;
use std::fmt;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, SystemTime};

/// How far away the server is.
const DELAY: Duration = Duration::from_millis(20);

/// What happens to a request.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Status(u16),
    /// The connection is cut after so many bytes of the body.
    Cut(usize),
    /// The answer has so many bytes, and says so.
    Short(usize),
    /// The body has so many bytes more than the answer says.
    Long(usize),
    /// The range of the answer begins so many bytes later.
    Late(u64),
}

#[derive(Debug, Default)]
pub(super) struct State {
    pub(super) body: Vec<u8>,
    pub(super) e_tag: Option<&'static str>,
    /// Seconds.
    pub(super) modified: u64,
    /// `If-Match` is not looked at.
    pub(super) ignores_conditions: bool,
    pub(super) faults: VecDeque<Fault>,
    /// The ranges that were asked for.
    pub(super) asked: Vec<Range<u64>>,
    /// No answer before so many requests have arrived.
    pub(super) answers_from: usize,
    pub(super) is_over: bool,
}

/// The server. Ends on drop.
#[derive(Debug)]
pub(super) struct Server {
    addr: SocketAddr,
    state: Arc<Mutex<State>>,
    thread: Option<JoinHandle<()>>,
}

impl Server {
    pub(super) fn new(state: State) -> Arc<Self> {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let addr = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(state));
        let of_thread = state.clone();
        let thread = std::thread::spawn(move || {
            std::thread::scope(|scope| {
                for stream in listener.incoming() {
                    if of_thread.lock().unwrap().is_over {
                        return;
                    }
                    // A client that has gone is no failure of the server.
                    scope.spawn(|| stream.and_then(|stream| answer(&of_thread, stream)));
                }
            });
        });
        Arc::new(Self { addr, state, thread: Some(thread) })
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    pub(super) fn take_asked(&self) -> Vec<Range<u64>> {
        std::mem::take(&mut self.lock().asked)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.lock().is_over = true;
        drop(TcpStream::connect(self.addr));
        self.thread.take().unwrap().join().unwrap();
    }
}

/// The head of a message: its first line, and its fields with names in lower case.
fn head(from: &mut impl BufRead) -> io::Result<(String, Vec<(String, String)>)> {
    let mut lines = from.lines();
    let first = lines.next().unwrap_or_else(|| Err(io::ErrorKind::UnexpectedEof.into()))?;
    let mut fields = Vec::new();
    for line in lines {
        let line = line?;
        let Some((name, value)) = line.split_once(": ") else { break };
        fields.push((name.to_lowercase(), value.to_owned()));
    }
    Ok((first, fields))
}

fn field<'f>(fields: &'f [(String, String)], name: &str) -> Option<&'f str> {
    fields.iter().find(|(field, _)| field == name).map(|(_, value)| &**value)
}

/// The range of `bytes=0-9` or `bytes 0-9/100`.
fn range_of(value: &str) -> Range<u64> {
    let value = value.trim_start_matches("bytes").trim_start_matches(['=', ' ']);
    let (start, end) = value.split('/').next().unwrap().split_once('-').unwrap();
    start.parse().unwrap()..end.parse::<u64>().unwrap() + 1
}

fn answer(state: &Mutex<State>, mut stream: TcpStream) -> io::Result<()> {
    let (first, fields) = head(&mut BufReader::new(&stream))?;
    let range = field(&fields, "range").map(range_of);
    state.lock().unwrap().asked.extend(range.clone());
    std::thread::sleep(DELAY);
    let is_early = || {
        let state = state.lock().unwrap();
        state.asked.len() < state.answers_from
    };
    while is_early() {
        std::thread::sleep(Duration::from_millis(1));
    }
    let mut state = state.lock().unwrap();
    let fault = state.faults.pop_front();
    let is_stale = field(&fields, "if-match").is_some_and(|tag| Some(tag) != state.e_tag) && !state.ignores_conditions;
    let status = match fault {
        Some(Fault::Status(status)) => status,
        _ if is_stale => 412,
        _ => 206,
    };
    if status != 206 {
        return write!(stream, "HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n");
    }
    let size = state.body.len() as u64;
    let mut range = range.unwrap_or(0..size);
    match fault {
        Some(Fault::Short(bytes)) => range.end = range.start + bytes as u64,
        Some(Fault::Late(bytes)) => range.start += bytes,
        _ => {}
    }
    let len = range.end - range.start;
    write!(stream, "HTTP/1.1 206 Partial Content\r\nContent-Length: {len}\r\n")?;
    // An empty object has no last byte.
    write!(stream, "Content-Range: bytes {}-{}/{size}\r\n", range.start, range.end.max(1) - 1)?;
    write!(stream, "X-Modified: {}\r\n", state.modified)?;
    state.e_tag.map_or(Ok(()), |tag| write!(stream, "ETag: {tag}\r\n"))?;
    write!(stream, "\r\n")?;
    if first.starts_with("HEAD") {
        return Ok(());
    }
    let mut body = state.body[range.start as usize..range.end as usize].to_vec();
    match fault {
        Some(Fault::Cut(bytes)) => body.truncate(bytes),
        Some(Fault::Long(bytes)) => body.resize(body.len() + bytes, 0xbb),
        _ => {}
    }
    stream.write_all(&body)
}

/// A store with the server's object alone, whatever its path.
#[derive(Debug)]
pub(super) struct HttpStore(pub(super) Arc<Server>);

impl fmt::Display for HttpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "http://{}", self.0.addr)
    }
}

/// A body, part by part.
struct Parts(VecDeque<Result<Bytes>>);

impl Stream for Parts {
    type Item = Result<Bytes>;
    fn poll_next(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        Poll::Ready(self.0.pop_front())
    }
}

fn generic(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Error::Generic { store: "http", source: why.into() }
}

fn ask(addr: SocketAddr, path: &Path, options: &GetOptions) -> Result<GetResult> {
    let failed = |error: io::Error| generic(error);
    let mut stream = TcpStream::connect(addr).map_err(failed)?;
    let mut request = format!("{} /{path} HTTP/1.1\r\n", if options.head { "HEAD" } else { "GET" });
    if let Some(GetRange::Bounded(range)) = &options.range {
        request += &format!("Range: bytes={}-{}\r\n", range.start, range.end - 1);
    }
    if let Some(tag) = &options.if_match {
        request += &format!("If-Match: {tag}\r\n");
    }
    stream.write_all((request + "\r\n").as_bytes()).map_err(failed)?;
    let mut from = BufReader::new(stream);
    let (first, fields) = head(&mut from).map_err(failed)?;
    let (location, source) = (path.to_string(), generic(first.clone()).into());
    match first.split(' ').nth(1).unwrap_or_default() {
        "206" => {}
        "404" => return Err(Error::NotFound { path: location, source }),
        "412" => return Err(Error::Precondition { path: location, source }),
        "403" => return Err(Error::PermissionDenied { path: location, source }),
        _ => return Err(generic(first)),
    }
    let of_range = field(&fields, "content-range").unwrap();
    let modified = Duration::from_secs(field(&fields, "x-modified").unwrap().parse().unwrap());
    let meta = ObjectMeta {
        location: path.clone(),
        last_modified: (SystemTime::UNIX_EPOCH + modified).into(),
        size: of_range.split_once('/').unwrap().1.parse().unwrap(),
        e_tag: field(&fields, "etag").map(str::to_owned),
        version: None,
    };
    let mut body = Vec::new();
    if !options.head {
        from.read_to_end(&mut body).map_err(failed)?;
    }
    let mut parts: VecDeque<_> = body.chunks(1000).map(|part| Ok(Bytes::copy_from_slice(part))).collect();
    // Some clients notice a body that is cut, and some only end it.
    let len: usize = field(&fields, "content-length").unwrap().parse().unwrap();
    if body.len() < len && len.is_multiple_of(2) {
        parts.push_back(Err(generic("the connection was cut")));
    }
    let payload = GetResultPayload::Stream(Box::pin(Parts(parts)));
    Ok(GetResult {
        payload,
        meta,
        range: range_of(of_range),
        attributes: Default::default(),
        extensions: Default::default(),
    })
}

type Listed<T> = Pin<Box<dyn Stream<Item = Result<T>> + Send>>;

#[async_trait]
impl ObjectStore for HttpStore {
    async fn get_opts(&self, path: &Path, options: GetOptions) -> Result<GetResult> {
        let (addr, path) = (self.0.addr, path.clone());
        tokio::task::spawn_blocking(move || ask(addr, &path, &options)).await.unwrap()
    }
    async fn put_opts(&self, _: &Path, _: PutPayload, _: PutOptions) -> Result<PutResult> {
        unreachable!("a backing only asks for objects")
    }
    async fn put_multipart_opts(&self, _: &Path, _: PutMultipartOptions) -> Result<Box<dyn MultipartUpload>> {
        unreachable!("a backing only asks for objects")
    }
    fn delete_stream(&self, _: Listed<Path>) -> Listed<Path> {
        unreachable!("a backing only asks for objects")
    }
    fn list(&self, _: Option<&Path>) -> Listed<ObjectMeta> {
        unreachable!("a backing only asks for objects")
    }
    async fn list_with_delimiter(&self, _: Option<&Path>) -> Result<ListResult> {
        unreachable!("a backing only asks for objects")
    }
    async fn copy_opts(&self, _: &Path, _: &Path, _: CopyOptions) -> Result<()> {
        unreachable!("a backing only asks for objects")
    }
}
