//! Finds in the library's sources what a mutant may change.
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use syn::parse::ParseStream;
use syn::punctuated::Punctuated;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};
use syn::{Attribute, BinOp, Expr, ImplItem, Item, Meta, Pat, Stmt, Token, TraitItem, UnOp};

/// The features of `pagemill` that are compiled in.
pub(crate) const FEATURES: [&str; 1] = ["cuda"];
/// Calls that a test cannot miss: they order memory accesses, which the models look at, or give time away.
const NOT_SEEN: [&str; 5] = ["fence", "compiler_fence", "spin_loop", "spin_wait", "yield_now"];

/// One change to one place.
#[derive(Clone, Debug)]
pub(crate) struct Mutant {
    /// What `PAGEMILL_MUTANT` says to have it; given to those of the sample.
    pub(crate) number: u32,
    /// The crate that it is in.
    pub(crate) package: &'static str,
    /// The file, from the repository's root on.
    pub(crate) file: String,
    /// Where in the file.
    pub(crate) range: Range<usize>,
    /// The line that it begins in, and what that says.
    pub(crate) line: usize,
    pub(crate) source: String,
    /// What is exchanged, in words.
    pub(crate) what: String,
    /// What stands there instead. None: nothing, as the statement is left out.
    pub(crate) mutated: Option<String>,
}

impl Mutant {
    /// What stays the same when lines are added above.
    pub(crate) fn key(&self) -> (String, String) {
        (format!("{}: {}", self.file, self.what), self.source.clone())
    }
}

/// All mutants of a crate, its files in the order in which modules name them.
pub(crate) fn all(root: &Path, package: &'static str) -> Vec<Mutant> {
    let mut found = Vec::new();
    file(root, package, PathBuf::from(format!("crates/{package}/src/lib.rs")), &mut found);
    found
}

fn file(root: &Path, package: &'static str, path: PathBuf, found: &mut Vec<Mutant>) {
    let text = fs::read_to_string(root.join(&path)).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let parsed = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    let mut finder = Finder { root, package, path, text: &text, found };
    finder.visit_file(&parsed);
}

struct Finder<'a> {
    root: &'a Path,
    package: &'static str,
    path: PathBuf,
    text: &'a str,
    found: &'a mut Vec<Mutant>,
}

impl Finder<'_> {
    fn add(&mut self, of: &impl Spanned, what: String, mutated: Option<String>) {
        let range = of.span().byte_range();
        let line = self.text[..range.start].matches('\n').count() + 1;
        let source = self.text.lines().nth(line - 1).unwrap_or_default().trim().to_owned();
        let file = self.path.display().to_string();
        self.found.push(Mutant { number: 0, package: self.package, file, range, line, source, what, mutated });
    }

    fn slice(&self, of: &impl Spanned) -> &str {
        &self.text[of.span().byte_range()]
    }

    /// The attributes that something begins with.
    fn attributes(&self, of: &impl Spanned) -> Vec<Attribute> {
        let text = self.slice(of);
        if !text.starts_with(['#', '/']) {
            return Vec::new();
        }
        let attributes = |input: ParseStream| {
            let outer = input.call(Attribute::parse_outer)?;
            input.parse::<proc_macro2::TokenStream>()?;
            Ok(outer)
        };
        syn::parse::Parser::parse_str(attributes, text).expect("what was parsed once can be parsed")
    }

    /// Whether it is compiled here, and is no test.
    fn is_on(&self, of: &impl Spanned) -> bool {
        self.attributes(of)
            .iter()
            .filter(|attribute| attribute.path().is_ident("cfg"))
            .all(|attribute| attribute.parse_args::<Meta>().is_ok_and(|meta| holds(&meta)))
    }

    /// The file of a module that has one of its own.
    fn file_of(&self, module: &syn::ItemMod) -> PathBuf {
        for attribute in self.attributes(module).iter().filter(|attribute| attribute.path().is_ident("cfg_attr")) {
            let parts = attribute.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default();
            if let [condition, Meta::NameValue(pair)] = &parts.iter().collect::<Vec<_>>()[..]
                && pair.path.is_ident("path")
                && holds(condition)
                && let Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(place), .. }) = &pair.value
            {
                return self.path.with_file_name(place.value());
            }
        }
        let folder = match self.path.file_stem().and_then(|stem| stem.to_str()) {
            Some("lib" | "mod") => self.path.parent().unwrap().to_owned(),
            _ => self.path.with_extension(""),
        };
        let name = module.ident.to_string();
        let beside = folder.join(format!("{name}.rs"));
        if self.root.join(&beside).exists() { beside } else { folder.join(name).join("mod.rs") }
    }

    /// `if c` to `if !c`: also of loops and arms.
    fn condition(&mut self, of: &Expr) {
        let mut inside = of;
        while let Expr::Paren(paren) = inside {
            inside = &paren.expr;
        }
        let has_pattern = |e: &Expr| matches!(e, Expr::Let(_)) || matches!(e, Expr::Binary(b) if lets(b));
        if has_pattern(inside) || matches!(inside, Expr::Macro(m) if m.mac.path.is_ident("cfg")) {
            return;
        }
        let negated = format!("!({})", self.slice(of));
        self.add(of, "the condition negated".to_owned(), Some(negated));
    }
}

/// Whether a chain of conditions has a `let`.
fn lets(binary: &syn::ExprBinary) -> bool {
    [&binary.left, &binary.right].iter().any(|side| match &***side {
        Expr::Let(_) => true,
        Expr::Binary(inner) => lets(inner),
        _ => false,
    })
}

/// What a `cfg` says of this build: the tests' own, with assertions.
fn holds(meta: &Meta) -> bool {
    match meta {
        Meta::Path(path) => path.is_ident("unix") || path.is_ident("debug_assertions"),
        Meta::NameValue(pair) => {
            let Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(value), .. }) = &pair.value else { return false };
            let value = value.value();
            pair.path.get_ident().is_some_and(|name| match name.to_string().as_str() {
                "feature" => FEATURES.contains(&value.as_str()),
                "target_arch" => value == std::env::consts::ARCH,
                "target_os" => value == std::env::consts::OS,
                "target_pointer_width" => value == "64",
                other => panic!("cfg({other} = ...) is not known here"),
            })
        }
        Meta::List(list) => {
            let parts = list.parse_args_with(Punctuated::<Meta, Token![,]>::parse_terminated).unwrap_or_default();
            let mut parts = parts.iter();
            match list.path.get_ident().map(ToString::to_string).as_deref() {
                Some("not") => !parts.all(holds),
                Some("any") => parts.any(holds),
                _ => parts.all(holds),
            }
        }
    }
}

fn exchanged(op: &BinOp) -> Option<&'static str> {
    Some(match op {
        BinOp::Lt(_) => "<=",
        BinOp::Le(_) => "<",
        BinOp::Gt(_) => ">=",
        BinOp::Ge(_) => ">",
        BinOp::Eq(_) => "!=",
        BinOp::Ne(_) => "==",
        BinOp::And(_) => "||",
        BinOp::Or(_) => "&&",
        BinOp::Add(_) => "-",
        BinOp::Sub(_) | BinOp::Mul(_) | BinOp::Div(_) => "+",
        BinOp::BitAnd(_) => "|",
        BinOp::BitOr(_) => "&",
        BinOp::Shl(_) => ">>",
        BinOp::Shr(_) => "<<",
        BinOp::AddAssign(_) => "-=",
        BinOp::SubAssign(_) => "+=",
        BinOp::BitAndAssign(_) => "|=",
        BinOp::BitOrAssign(_) => "&=",
        _ => return None,
    })
}

/// The function's or method's name, of a call.
fn called(expr: &Expr) -> Option<String> {
    match expr {
        Expr::Call(call) => match &*call.func {
            Expr::Path(path) => path.path.segments.last().map(|segment| segment.ident.to_string()),
            _ => Some(String::new()),
        },
        Expr::MethodCall(call) => Some(call.method.to_string()),
        Expr::Try(tried) => called(&tried.expr),
        _ => None,
    }
}

impl<'ast> Visit<'ast> for Finder<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        if !self.is_on(item) {
            return;
        }
        match item {
            Item::Fn(function) if function.sig.constness.is_some() => {}
            Item::Fn(_) | Item::Impl(_) | Item::Trait(_) => visit::visit_item(self, item),
            Item::Mod(module) if module.content.is_some() => visit::visit_item(self, item),
            Item::Mod(module) => file(self.root, self.package, self.file_of(module), self.found),
            // What is worked out by the compiler has no switch.
            _ => {}
        }
    }

    fn visit_impl_item(&mut self, item: &'ast ImplItem) {
        if matches!(item, ImplItem::Fn(function) if function.sig.constness.is_none()) && self.is_on(item) {
            visit::visit_impl_item(self, item);
        }
    }

    fn visit_trait_item(&mut self, item: &'ast TraitItem) {
        if matches!(item, TraitItem::Fn(function) if function.sig.constness.is_none()) && self.is_on(item) {
            visit::visit_trait_item(self, item);
        }
    }

    fn visit_pat(&mut self, _: &'ast Pat) {}
    fn visit_type(&mut self, _: &'ast syn::Type) {}
    fn visit_path(&mut self, _: &'ast syn::Path) {}
    fn visit_attribute(&mut self, _: &'ast Attribute) {}
    fn visit_expr_const(&mut self, _: &'ast syn::ExprConst) {}
    fn visit_angle_bracketed_generic_arguments(&mut self, _: &'ast syn::AngleBracketedGenericArguments) {}

    fn visit_expr_repeat(&mut self, repeat: &'ast syn::ExprRepeat) {
        self.visit_expr(&repeat.expr);
    }

    fn visit_arm(&mut self, arm: &'ast syn::Arm) {
        if self.is_on(arm) {
            visit::visit_arm(self, arm);
        }
    }

    fn visit_stmt(&mut self, stmt: &'ast Stmt) {
        if !self.is_on(stmt) {
            return;
        }
        if let Stmt::Expr(expr, Some(_)) = stmt
            && let Some(name) = called(expr)
            && !NOT_SEEN.contains(&name.as_str())
        {
            self.add(stmt, format!("`{name}(..);` left out"), None);
        }
        visit::visit_stmt(self, stmt);
    }

    fn visit_expr(&mut self, expr: &'ast Expr) {
        if !self.is_on(expr) {
            return;
        }
        match expr {
            Expr::If(condition) => self.condition(&condition.cond),
            Expr::While(condition) => self.condition(&condition.cond),
            Expr::Unary(not) if matches!(not.op, UnOp::Not(_)) => {
                let operand = self.slice(&not.expr).to_owned();
                self.add(expr, "`!` left out".to_owned(), Some(operand));
            }
            Expr::Binary(binary) if !lets(binary) => {
                if let Some(by) = exchanged(&binary.op) {
                    let (all, op) = (expr.span().byte_range(), binary.op.span().byte_range());
                    let was = &self.text[op.clone()];
                    let mutated = format!("{}{by}{}", &self.text[all.start..op.start], &self.text[op.end..all.end]);
                    self.add(expr, format!("`{was}` to `{by}`"), Some(mutated));
                }
            }
            _ => {}
        }
        visit::visit_expr(self, expr);
    }
}
