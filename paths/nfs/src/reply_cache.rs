//! Answers that are kept, for requests that are sent again.
//!
//! A client that loses its connection sends a request again that may have been carried out. To remove a file twice is an
//! error the second time, and would be told to a program that has removed it once. So answers to requests that change something
//! are kept for a while, and given again to the same request of the same client.
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, RandomState};
use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use crate::call::Call;
use crate::sync::lock;

/// Answers that are kept, unless they are older.
const KEPT: usize = 1 << 16;
/// A client that has lost its connection asks again within this time.
const KEPT_FOR: Duration = Duration::from_secs(120);

/// A request, told apart from others of the same client: by its port too, which a client keeps when it connects again.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
struct RequestKey {
    peer: SocketAddr,
    xid: u32,
    procedure: u32,
    args: u64,
}

/// What the cache has of a request.
pub(crate) enum Lookup<'c> {
    /// Nothing: it is to be carried out.
    New(Unanswered<'c>),
    /// Another thread carries it out.
    InProgress,
    /// It was answered so.
    Answered(Vec<u8>),
}

#[derive(Default)]
pub(crate) struct ReplyCache {
    replies: Mutex<KeptReplies>,
    hasher: RandomState,
}

#[derive(Default)]
struct KeptReplies {
    /// None while the request is carried out.
    by_request: HashMap<RequestKey, Option<Vec<u8>>>,
    /// The oldest first.
    order: VecDeque<(Instant, RequestKey)>,
}

impl ReplyCache {
    pub(crate) fn look_up(&self, call: &Call<'_>) -> Lookup<'_> {
        let args = self.hasher.hash_one(call.args);
        let key = RequestKey { peer: call.peer, xid: call.xid, procedure: call.procedure, args };
        let mut replies = lock(&self.replies);
        match replies.by_request.get(&key) {
            Some(Some(results)) => return Lookup::Answered(results.clone()),
            Some(None) => return Lookup::InProgress,
            None => {}
        }
        replies.by_request.insert(key, None);
        Lookup::New(Unanswered { cache: self, key })
    }
}

/// A request that is carried out. Dropped without an answer, also by a panic, it is forgotten.
pub(crate) struct Unanswered<'c> {
    cache: &'c ReplyCache,
    key: RequestKey,
}

impl Unanswered<'_> {
    pub(crate) fn answered(self, results: &[u8]) {
        let mut replies = lock(&self.cache.replies);
        replies.by_request.insert(self.key, Some(results.to_vec()));
        replies.order.push_back((Instant::now(), self.key));
        while let Some(&(since, oldest)) = replies.order.front()
            && (replies.order.len() > KEPT || since.elapsed() > KEPT_FOR)
        {
            replies.order.pop_front();
            replies.by_request.remove(&oldest);
        }
        drop(replies);
        // It has its answer.
        std::mem::forget(self);
    }
}

impl Drop for Unanswered<'_> {
    fn drop(&mut self) {
        lock(&self.cache.replies).by_request.remove(&self.key);
    }
}
