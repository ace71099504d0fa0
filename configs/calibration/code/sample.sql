-- A lending library: schema, a few rows, the questions its desk asks every day.

CREATE TABLE author (
    author_id   INTEGER PRIMARY KEY,
    name        TEXT NOT NULL,
    born        INTEGER,
    died        INTEGER,
    CHECK (died IS NULL OR died >= born)
);

CREATE TABLE book (
    book_id     INTEGER PRIMARY KEY,
    title       TEXT NOT NULL,
    author_id   INTEGER NOT NULL REFERENCES author (author_id) ON DELETE RESTRICT,
    published   INTEGER,
    language    CHAR(2) NOT NULL DEFAULT 'en',
    copies      SMALLINT NOT NULL CHECK (copies >= 0),
    UNIQUE (title, author_id)
);

CREATE TABLE member (
    member_id   INTEGER PRIMARY KEY,
    name        VARCHAR(120) NOT NULL,
    email       VARCHAR(254) UNIQUE,
    joined      DATE NOT NULL DEFAULT CURRENT_DATE,
    active      BOOLEAN NOT NULL DEFAULT TRUE
);

CREATE TABLE loan (
    loan_id     INTEGER PRIMARY KEY,
    book_id     INTEGER NOT NULL REFERENCES book,
    member_id   INTEGER NOT NULL REFERENCES member,
    lent_on     DATE NOT NULL,
    due_on      DATE NOT NULL,
    returned_on DATE,
    CHECK (due_on > lent_on)
);

CREATE INDEX loan_open ON loan (member_id, due_on) WHERE returned_on IS NULL;

INSERT INTO author (author_id, name, born, died) VALUES
    (1, 'Jane Austen', 1775, 1817),
    (2, 'Mary Shelley', 1797, 1851),
    (3, 'Jules Verne', 1828, 1905);

INSERT INTO book (book_id, title, author_id, published, language, copies) VALUES
    (10, 'Northanger Abbey', 1, 1817, 'en', 3),
    (11, 'Persuasion', 1, 1817, 'en', 2),
    (12, 'Frankenstein', 2, 1818, 'en', 4),
    (13, 'Vingt mille lieues sous les mers', 3, 1870, 'fr', 1);

-- Which books are overdue, and by how many days?
SELECT m.name, b.title, l.due_on, CURRENT_DATE - l.due_on AS days_late
FROM loan AS l
JOIN member AS m USING (member_id)
JOIN book AS b USING (book_id)
WHERE l.returned_on IS NULL
  AND l.due_on < CURRENT_DATE
ORDER BY days_late DESC, m.name
LIMIT 50;

-- Copies on the shelf right now.
SELECT b.title,
       b.copies - COUNT(l.loan_id) AS on_shelf
FROM book AS b
LEFT JOIN loan AS l ON l.book_id = b.book_id AND l.returned_on IS NULL
GROUP BY b.book_id, b.title, b.copies
HAVING b.copies - COUNT(l.loan_id) > 0
ORDER BY b.title;

-- The most read author of every year, with ties.
WITH reads AS (
    SELECT EXTRACT(YEAR FROM l.lent_on) AS year, a.name, COUNT(*) AS loans
    FROM loan AS l
    JOIN book AS b ON b.book_id = l.book_id
    JOIN author AS a ON a.author_id = b.author_id
    GROUP BY 1, 2
), ranked AS (
    SELECT *, RANK() OVER (PARTITION BY year ORDER BY loans DESC) AS place
    FROM reads
)
SELECT year, name, loans FROM ranked WHERE place = 1 ORDER BY year;

-- Lend a copy: one statement, so two desks cannot lend the last one twice.
BEGIN;
INSERT INTO loan (loan_id, book_id, member_id, lent_on, due_on)
SELECT COALESCE(MAX(loan_id), 0) + 1, :book, :member, CURRENT_DATE, CURRENT_DATE + INTERVAL '21 days'
FROM loan
WHERE (SELECT copies FROM book WHERE book_id = :book)
    > (SELECT COUNT(*) FROM loan WHERE book_id = :book AND returned_on IS NULL);
COMMIT;

UPDATE member
SET active = FALSE
WHERE member_id NOT IN (SELECT member_id FROM loan WHERE lent_on > CURRENT_DATE - INTERVAL '2 years');

DELETE FROM loan WHERE returned_on < DATE '2015-01-01';
