/* Doubly linked lists whose links lie in the elements. SPDX-License-Identifier: MIT OR Apache-2.0 */
#ifndef PAGEMILL_LINUX_LIST_H
#define PAGEMILL_LINUX_LIST_H

#include <linux/compiler.h>

/* What the links of an element point to that was taken off its list: no memory is there. */
#define LIST_POISON1 ((void *)0x100)
#define LIST_POISON2 ((void *)0x122)

#define LIST_HEAD_INIT(name) {&(name), &(name)}
#define LIST_HEAD(name) struct list_head name = LIST_HEAD_INIT(name)

static inline void INIT_LIST_HEAD(struct list_head *list) {
    list->next = list;
    list->prev = list;
}

static inline void __list_add(struct list_head *element, struct list_head *prev, struct list_head *next) {
    element->next = next;
    element->prev = prev;
    next->prev = element;
    prev->next = element;
}

/* At the head. */
static inline void list_add(struct list_head *element, struct list_head *head) {
    __list_add(element, head, head->next);
}

static inline void list_add_tail(struct list_head *element, struct list_head *head) {
    __list_add(element, head->prev, head);
}

static inline void __list_del(struct list_head *prev, struct list_head *next) {
    next->prev = prev;
    prev->next = next;
}

static inline void list_del(struct list_head *element) {
    __list_del(element->prev, element->next);
    element->next = (struct list_head *)LIST_POISON1;
    element->prev = (struct list_head *)LIST_POISON2;
}

static inline void list_del_init(struct list_head *element) {
    __list_del(element->prev, element->next);
    INIT_LIST_HEAD(element);
}

static inline void list_move(struct list_head *element, struct list_head *head) {
    __list_del(element->prev, element->next);
    list_add(element, head);
}

static inline void list_move_tail(struct list_head *element, struct list_head *head) {
    __list_del(element->prev, element->next);
    list_add_tail(element, head);
}

static inline int list_empty(const struct list_head *head) {
    return READ_ONCE(head->next) == head;
}

static inline int list_is_singular(const struct list_head *head) {
    return !list_empty(head) && head->next == head->prev;
}

static inline int list_is_last(const struct list_head *element, const struct list_head *head) {
    return element->next == head;
}

/* All elements of `list` at the head of another, in their order. `list` must be made anew then. */
static inline void list_splice(const struct list_head *list, struct list_head *head) {
    if (list_empty(list))
        return;
    list->next->prev = head;
    list->prev->next = head->next;
    head->next->prev = list->prev;
    head->next = list->next;
}

static inline void list_splice_tail(const struct list_head *list, struct list_head *head) {
    list_splice(list, head->prev);
}

static inline void list_splice_init(struct list_head *list, struct list_head *head) {
    list_splice(list, head);
    INIT_LIST_HEAD(list);
}

static inline void list_splice_tail_init(struct list_head *list, struct list_head *head) {
    list_splice_tail(list, head);
    INIT_LIST_HEAD(list);
}

#define list_entry(pointer, type, member) container_of(pointer, type, member)
#define list_first_entry(head, type, member) list_entry((head)->next, type, member)
#define list_last_entry(head, type, member) list_entry((head)->prev, type, member)
#define list_first_entry_or_null(head, type, member) \
    (list_empty(head) ? NULL : list_first_entry(head, type, member))
#define list_next_entry(at, member) list_entry((at)->member.next, __typeof__(*(at)), member)
#define list_prev_entry(at, member) list_entry((at)->member.prev, __typeof__(*(at)), member)

#define list_for_each(at, head) for (at = (head)->next; at != (head); at = at->next)
#define list_for_each_safe(at, after, head) \
    for (at = (head)->next, after = at->next; at != (head); at = after, after = at->next)
#define list_for_each_entry(at, head, member)                                              \
    for (at = list_first_entry(head, __typeof__(*at), member); &at->member != (head);      \
         at = list_next_entry(at, member))
#define list_for_each_entry_reverse(at, head, member)                                      \
    for (at = list_last_entry(head, __typeof__(*at), member); &at->member != (head);       \
         at = list_prev_entry(at, member))
#define list_for_each_entry_safe(at, after, head, member)                                  \
    for (at = list_first_entry(head, __typeof__(*at), member), after = list_next_entry(at, member); \
         &at->member != (head); at = after, after = list_next_entry(after, member))

#endif
